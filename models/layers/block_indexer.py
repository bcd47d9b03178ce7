"""Qwen's sparse attention: an indexer chooses blocks of keys, and a token attends to these alone.

Math as in transformers 5.23, modeling_qwen4_exp.py (Qwen4ExpTextQSAIndexer). With r tokens in a
block, a token that sees n tokens attends to the `top` best of the n // r whole blocks, and to the
n % r tokens after them. A block's key is the mean of its tokens' keys, normed, and rotated to the
place of its first token. Its score is the sum over heads of relu(q · key). An earlier block comes
before a later one with an equal score. So nothing is left out up to (top + 1) · r - 1 tokens:

    tokens seen   1 ………… (top + 1) · r - 1 │ (top + 1) · r …………
    attention     dense                    │ row by row over top · r + n % r gathered keys

The cache has one plane of index keys. A block's key replaces that of its last token, once it is
there: from then on nothing reads the keys of its tokens. So a plane's column depends on no later
token, and a state may be cut anywhere.

    r = 4       k0 k1 k2 [block 0] k4 k5 k6 [block 1] k8 k9
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeinf.models.base import Parts
from moeinf.models.config import MAX_CONTEXT, MAX_HEADS, MAX_WIDTH, Fields, require
from moeinf.models.layers.attention import (
    GqaCore,
    GqaShape,
    attend_one,
    gqa_projections,
    head_blocks,
)
from moeinf.models.layers.indexer import largest
from moeinf.models.layers.kv_cache import KvCache, PassRows, Span
from moeinf.models.layers.mla import as_index
from moeinf.models.layers.norms import HeadNorm, centred_norm
from moeinf.models.layers.rope import Rope, RopeConfig, rotate_half
from moeinf.models.layers.sparse_mla import divided_at, only


@dataclass(frozen=True)
class BlockIndexShape:
    """Sizes by their config keys."""

    heads: int  # indexer_n_heads
    width: int  # indexer_head_dim
    top: int  # blocks: indexer_budget / indexer_compress_ratio
    block: int  # tokens of a block: indexer_compress_ratio

    @property
    def dense(self) -> int:
        """The number of tokens up to which every token sees all."""
        return (self.top + 1) * self.block - 1


def parse_block_indexer(fields: Fields, rotated: int) -> BlockIndexShape:
    """Read the sizes, all of which must be there; rotated: dimensions of a head that rotate."""
    fields.integer("indexer_kv_heads", high=1)
    budget = fields.integer("indexer_budget", high=MAX_CONTEXT)
    block = fields.integer("indexer_compress_ratio", high=MAX_CONTEXT)
    width = fields.integer("indexer_head_dim", high=MAX_WIDTH)
    require(budget % block == 0, f"indexer_budget {budget} is not a multiple of {block}")
    require(rotated <= width, f"indexer_head_dim {width} is below the {rotated} that rotate")
    heads = fields.integer("indexer_n_heads", high=MAX_HEADS)
    return BlockIndexShape(heads, width, budget // block, block)


class BlockIndexer:
    """The indexer of one layer. Its keys are a plane of the KV cache."""

    def __init__(
        self,
        plane: int,
        shape: BlockIndexShape,
        hidden: int,
        eps: float,
        rope: tuple[RopeConfig, int],
        parts: Parts,
        prefix: str,
    ) -> None:
        """Build the indexer `prefix`.*; plane: see KvCache.planes. rope: as of a Rope."""
        self._plane, self._shape = plane, shape
        self._qk = parts.linear(f"{prefix}.index_qk_proj", (shape.heads + 1) * shape.width, hidden)
        self._q_norm = HeadNorm(centred_norm(parts, f"{prefix}.q_layernorm", shape.width, eps))
        self._k_norm = centred_norm(parts, f"{prefix}.k_layernorm", shape.width, eps)
        self._rope = Rope(*rope, self._k_norm.weight.device)

    def __call__(self, x: Tensor, rows: PassRows, far: Sequence[Span]) -> list[list[Tensor]]:
        """Write the keys of all rows x [T, D] into the caches, and choose for the rows of `far`.

        Returns for each span of `far` and each of its rows the places [n] int32, ascending.
        """
        widths = [self._shape.heads * self._shape.width, self._shape.width]
        q, keys = torch.split(self._qk(x), widths, -1)
        for span in rows.spans:
            (plane,) = span.cache.write(self._plane, span.past, keys[span.rows, None])
            self._close_blocks(span.cache, plane[0], span.past, span.past + span.count)
        if not far:
            return []
        q = torch.unflatten(self._q_norm(q), -1, (self._shape.heads, -1))  # [T, H, W]
        q = rotate_half(q, rows.cos, rows.sin)
        return [self._chosen(q[span.rows].float(), span) for span in far]

    def _close_blocks(self, cache: KvCache, stored: Tensor, past: int, total: int) -> None:
        """Write the keys of blocks that end with tokens past … total - 1; stored [S, …]."""
        size, width = self._shape.block, self._shape.width
        first, last = past // size, total // size
        if first == last:
            return
        raw = cache.values(stored[first * size : last * size], width)
        means = torch.unflatten(raw, 0, (-1, size)).float().mean(1).to(raw.dtype)  # [n, W]
        starts = torch.arange(first, last, device=raw.device) * size
        cos, sin = self._rope(starts, [cache.capacity] * len(starts))
        made = rotate_half(self._k_norm(means)[:, None], cos, sin)  # [n, 1, W]
        for number, key in enumerate(made, first):
            cache.write(self._plane, number * size + size - 1, key[None])

    def _chosen(self, q: Tensor, span: Span) -> list[Tensor]:
        """Choose for n rows with queries q [n, H, W] float32."""
        shape = self._shape
        (stored,) = span.cache.planes(self._plane)
        blocks = (span.past + span.count) // shape.block
        ends = stored[0, shape.block - 1 : blocks * shape.block : shape.block]
        keys = span.cache.values(ends, shape.width).float()  # [B, W]
        inside = torch.arange(shape.block, device=q.device)
        found = []
        for at in head_blocks(span.count, 4 * (shape.heads + 2) * blocks):
            scores = (q[at] @ keys.mT).relu().sum(1)  # [n, B]
            for row, mine in enumerate(scores, span.past + at.start + 1):  # row: tokens it sees
                whole = row // shape.block
                top = largest(mine[None, :whole].nan_to_num(0.0), shape.top)[0]  # [top]
                places = (top[:, None] * shape.block + inside).flatten()
                tail = torch.arange(whole * shape.block, row, device=q.device)
                found.append(torch.cat((places, tail)).int())
        return found


class SparseGqaAttention:
    """Gated grouped-query attention of one layer to the keys that an indexer chooses."""

    def __init__(
        self,
        layer: int,
        shape: GqaShape,
        index: BlockIndexShape,
        indexer: BlockIndexer,
        hidden: int,
        eps: float,
        parts: Parts,
        prefix: str,
    ) -> None:
        def head_norm(which: str) -> HeadNorm:
            return HeadNorm(centred_norm(parts, f"{prefix}.{which}", shape.head_dim, eps))

        self._projections = gqa_projections(parts, prefix, hidden, shape)
        self._torch_core = GqaCore(layer, shape, head_norm("q_norm"), head_norm("k_norm"))
        self._core = parts.tuned(self._torch_core)
        self._index, self._indexer = index, indexer

    def __call__(self, x: Tensor, rows: PassRows) -> Tensor:
        """Map x [T, D] to [T, D]; write keys, values and index keys into the caches."""
        p, heads = self._projections, self._torch_core.shape.heads
        both = torch.unflatten(p.q(x), -1, (heads, -1))  # [T, H, 2W]
        q, gate = (y.flatten(1) for y in both.chunk(2, -1))  # [T, H·W] each
        k, v = p.k(x), p.v(x)
        near, far = divided_at(rows.spans, self._index.dense)
        chosen = self._indexer(x, rows, far)
        if not far:
            return p.o(self._core(q, k, v, rows) * gate.sigmoid())
        out = torch.empty_like(q)
        if near:
            at = as_index([row for s in near for row in range(s.rows.start, s.rows.stop)])
            out[at] = self._core(q[at], k[at], v[at], only(near, at, rows))
        self._gathered(q, k, v, rows, far, chosen, out)
        return p.o(out * gate.sigmoid())

    def _gathered(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: PassRows,
        far: Sequence[Span],
        chosen: Sequence[Sequence[Tensor]],
        out: Tensor,
    ) -> None:
        """Attend with the rows of `far` to their places; write into out [T, H·W]."""
        core = self._torch_core
        shape = core.shape
        q, k, v = core.heads(q, k, v, rows)
        for span in far:
            span.cache.write(core.layer, span.past, k[span.rows], v[span.rows])
        for span, places in zip(far, chosen, strict=True):
            stored = span.cache.planes(core.layer)
            for row, mine in zip(range(span.rows.start, span.rows.stop), places, strict=True):
                keys, values = (
                    span.cache.values(plane.index_select(1, mine), shape.head_dim)
                    for plane in stored
                )
                grouped = q[row].view(shape.kv_heads, -1, shape.head_dim)
                out[row] = attend_one(grouped, keys, values, shape.softmax_scale).flatten()
