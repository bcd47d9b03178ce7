"""Latent attention to the keys that an indexer chooses (DeepSeek-V3.2, arXiv 2512.02556).

A token among the first index_topk ones sees all before it: its attention is that of mla.py. A later
token attends to the latents of its chosen places, which are gathered from the cache:

    position    0 ………… index_topk - 1 │ index_topk …………
    attention   dense: mla.py         │ row by row over index_topk gathered latents

With pools (pooled_indexer.py) the border is IndexerShape.reach. A row also sees the tokens after
its last whole pool.

So nothing here depends on how a prompt is cut, except the bits of products.

A layer without an indexer uses the choice of the last layer before it that has one (GLM-5.2, arXiv
2603.12201). The choice is in PassRows.chosen, because a pass may run in pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from moeinf.models.layers.indexer import Indexer, IndexerShape
from moeinf.models.layers.kv_cache import PassRows, Span
from moeinf.models.layers.mla import LowRank, MlaAttention, as_index


class SparseMlaAttention:
    """Latent attention of one layer, with an indexer or the choice of an earlier layer's."""

    def __init__(
        self, dense: MlaAttention, shape: IndexerShape, indexer: Indexer | None, lends: bool
    ) -> None:
        """Wrap a layer's dense attention.

        lends: whether the next layer uses the choice of this one.
        """
        self._dense, self._shape, self._indexer, self._lends = dense, shape, indexer, lends
        assert isinstance(dense.q, LowRank)
        self._q = dense.q

    def __call__(self, x: Tensor, rows: PassRows) -> Tensor:
        """Map x [T, D] to [T, D]; write latents and the indexer's keys into the caches."""
        narrow = self._q.narrow(x)
        near, far = divided_at(rows.spans, self._shape.reach)
        chosen = list(rows.chosen)
        if self._indexer is not None:
            chosen = self._indexer(x, narrow, rows, far)
        rows.chosen[:] = chosen if self._lends else ()
        q, latent = self._q.up(narrow), self._dense.kv_a(x)
        if not far:
            return self._dense.o(self._dense.core(q, latent, rows))
        shape = self._dense.torch_core.shape
        out = q.new_empty(len(q), shape.heads * shape.value)
        if near:
            at = as_index([row for s in near for row in range(s.rows.start, s.rows.stop)])
            out[at] = self._dense.core(q[at], latent[at], only(near, at, rows))
        self._gathered(q, latent, rows, far, chosen, out.view(len(q), shape.heads, -1))
        return self._dense.o(out)

    def _gathered(
        self,
        q: Tensor,
        latent: Tensor,
        rows: PassRows,
        far: Sequence[Span],
        chosen: Sequence[Tensor],
        out: Tensor,
    ) -> None:
        """Attend with the rows of `far` to their chosen places; write into out [T, H, v]."""
        core = self._dense.torch_core
        q_nope, q_rope, new = core.heads(q, latent, rows)
        for span in far:
            span.cache.write(core.layer, span.past, new[span.rows])
        for span, places in zip(far, chosen, strict=True):
            at = span.rows
            out[at] = core.absorbed(q_nope[at], q_rope[at], self._memories(span, places))

    def _memories(self, span: Span, places: Tensor) -> Iterator[Tensor]:
        """Yield the latents [S, kv_lora + rope] at the places of each row.

        A row sees `top` of its places, and those after its last whole pool.
        """
        core, top, pool = self._dense.torch_core, self._shape.top, self._shape.pool
        (stored,) = span.cache.planes(core.layer)
        for tokens, row in enumerate(places, span.past + 1):
            found = stored[0].index_select(0, row[: top + tokens % pool])
            yield span.cache.values(found, core.shape.kv_lora + core.shape.rope)


def divided_at(spans: Sequence[Span], top: int) -> tuple[list[Span], list[Span]]:
    """Return the rows among the first `top` tokens of their texts, and the rows after them."""
    near, far = [], []
    for span in spans:
        count = min(max(top - span.past, 0), span.count)
        border = span.rows.start + count
        if count:
            near.append(Span(span.cache, slice(span.rows.start, border), span.past))
        if count < span.count:
            far.append(Span(span.cache, slice(border, span.rows.stop), span.past + count))
    return near, far


def only(spans: Sequence[Span], at: slice | list[int], rows: PassRows) -> PassRows:
    """Return some spans as a pass of their own; at: their rows."""
    found, start = [], 0
    for span in spans:
        found.append(Span(span.cache, slice(start, start + span.count), span.past))
        start += span.count
    return PassRows(tuple(found), rows.positions[at], rows.cos[at], rows.sin[at])
