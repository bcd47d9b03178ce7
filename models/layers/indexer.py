"""The lightning indexer of DeepSeek-V3.2 (arXiv 2512.02556, section 2): which keys a token sees.

A token at position t gives each token s ≤ t the score

    sum over heads h of  w[t, h] · relu(q[t, h] · k[s])

and attends to the index_topk tokens with the largest scores. An earlier token comes before a later
one with an equal score. So up to index_topk tokens nothing is left out, and attention is dense.

The published kernels rotate q and k by a Hadamard matrix, which changes no product, and round both
to FP8. Here they keep the dtype of the cache. Scores are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moeinf.models.base import Parts
from moeinf.models.config import MAX_CONTEXT, MAX_HEADS, MAX_WIDTH, Fields, require
from moeinf.models.layers.attention import causal_mask, head_blocks
from moeinf.models.layers.kv_cache import KvCache, PassRows, Span
from moeinf.models.layers.norms import layer_norm
from moeinf.models.layers.rope import rotate_half, rotate_pairs

_EPS = 1e-6  # of k_norm
_KEYS = 2048  # whose scores are computed at once


@dataclass(frozen=True)
class IndexerShape:
    """Sizes by their config keys."""

    heads: int  # index_n_heads
    width: int  # index_head_dim
    top: int  # index_topk
    rope: int  # qk_rope_head_dim: the first values of a head, which rotate
    pairs: bool  # rope pairs 2i with 2i + 1, not i with i + rope / 2
    pool: int = 1  # index_kpool: consecutive tokens that are chosen together; see pooled_indexer.py

    def __post_init__(self) -> None:
        require(
            self.rope <= self.width,
            f"index_head_dim {self.width} is below qk_rope_head_dim {self.rope}",
        )
        require(
            self.top % self.pool == 0,
            f"index_topk {self.top} is not a multiple of index_kpool {self.pool}",
        )

    @property
    def reach(self) -> int:
        """The tokens of a text that see all before them: no choice leaves any out."""
        return self.top + self.pool - 1


def parse_indexer(fields: Fields, rope: int, pairs: bool, default_heads: int) -> IndexerShape:
    """Read the sizes; raise ModelDataError for invalid ones."""
    fields.refuse("indexer_rope_interleave", pairs)
    return IndexerShape(
        heads=fields.integer("index_n_heads", high=MAX_HEADS, default=default_heads),
        width=fields.integer("index_head_dim", high=MAX_WIDTH, default=128),
        top=fields.integer("index_topk", high=MAX_CONTEXT, default=2048),
        rope=rope,
        pairs=pairs,
    )


class Indexer:
    """The indexer of one layer. Its keys are a plane of the KV cache."""

    def __init__(
        self, plane: int, shape: IndexerShape, hidden: int, q_lora: int, parts: Parts, prefix: str
    ) -> None:
        """Build the indexer `prefix`.*; plane: of its keys, see KvCache.planes."""
        self._plane, self._shape = plane, shape
        self._q = parts.linear(f"{prefix}.wq_b", shape.heads * shape.width, q_lora)
        self._k = parts.linear(f"{prefix}.wk", shape.width, hidden)
        self._k_norm = layer_norm(parts, f"{prefix}.k_norm", shape.width, _EPS)
        self._weights = parts.tensor(f"{prefix}.weights_proj.weight", shape.heads, hidden)

    def __call__(
        self, x: Tensor, narrow: Tensor, rows: PassRows, far: Sequence[Span]
    ) -> list[Tensor]:
        """Write the keys of all rows into the caches, and choose for the rows of `far`.

        x [T, D]; narrow [T, q_lora]: the queries before their last projection. Every row of `far`
        has more than `reach` tokens. Returns for each span the places [n, top] int32, ascending.
        """
        self._remember(x, rows)
        if not far:
            return []
        queries = torch.unflatten(self._q(narrow), -1, (self._shape.heads, -1))  # [T, H, W]
        queries = self._turned(queries, rows)
        return [self._chosen(x[span.rows], queries[span.rows], span) for span in far]

    def _remember(self, x: Tensor, rows: PassRows) -> None:
        """Write the keys of all rows into the caches."""
        keys = self._turned(self._k_norm(self._k(x))[:, None], rows)  # [T, 1, W]
        for span in rows.spans:
            span.cache.write(self._plane, span.past, keys[span.rows])

    def _turned(self, y: Tensor, rows: PassRows) -> Tensor:
        """Rotate the first values of y [T, heads, W]."""
        if not self._shape.rope:
            return y
        first, rest = y[..., : self._shape.rope], y[..., self._shape.rope :]
        rotate = rotate_pairs if self._shape.pairs else rotate_half
        return torch.cat((rotate(first, rows.cos, rows.sin), rest), -1)

    def _chosen(self, x: Tensor, queries: Tensor, span: Span) -> Tensor:
        """Choose for n rows: x [n, D] and queries [n, H, W] -> places [n, top] int32."""
        shape, total = self._shape, span.past + span.count
        weights = functional.linear(x.float(), self._weights.float())  # [n, H]
        weights = weights * (shape.heads * shape.width) ** -0.5
        row_bytes = 4 * shape.heads * _KEYS + 16 * total
        found = []
        for at in head_blocks(span.count, row_bytes):
            scores = self._scores(queries[at], weights[at], span.cache, span.past + at.stop)
            found.append(self._places(scores, span.past + at.stop))
        return torch.cat(found)

    def _places(self, scores: Tensor, total: int) -> Tensor:
        """Return the places that the last n of `total` tokens see; scores: [n, total // pool]."""
        return largest(scores, self._shape.top)

    def _scores(self, queries: Tensor, weights: Tensor, cache: KvCache, total: int) -> Tensor:
        """Return the scores of all pools for the last n of `total` tokens.

        [n, total // pool] float32; -inf for a pool with a later token.
        """
        pools = total // self._shape.pool
        scores = weights.new_empty(len(weights), pools)
        for start in range(0, pools, _KEYS):
            part = slice(start, min(start + _KEYS, pools))
            keys = self._keys(cache, part)  # [p, W]
            products = (queries.float() @ keys.float().mT).relu()  # [n, H, p]
            scores[:, part] = (weights[:, None] @ products)[:, 0]
        seen = causal_mask(len(weights), total, None, scores.device)
        seen = seen[:, self._shape.pool - 1 :: self._shape.pool]  # the last token of each pool
        return scores.nan_to_num(0.0, torch.inf, -torch.inf).masked_fill_(~seen, -torch.inf)

    def _keys(self, cache: KvCache, pools: slice) -> Tensor:
        """Return the keys [p, W] of some pools."""
        (stored,) = cache.planes(self._plane)
        return cache.values(stored[0, pools], self._shape.width)


def largest(scores: Tensor, count: int) -> Tensor:
    """Return the places [n, count] int32, ascending, of the largest of scores [n, S].

    The first of several equal scores are taken. No score may be NaN.
    """
    least = scores.topk(count, sorted=False).values.amin(-1, keepdim=True)
    above, equal = scores > least, scores == least
    missing = count - above.sum(-1, keepdim=True)
    kept = above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= missing))
    return kept.nonzero()[:, 1].view(-1, count).int()
