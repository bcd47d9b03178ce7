"""The indexer of GLM-5.3-Flash: it chooses pools of consecutive tokens by one key per pool.

Math as in transformers 5.23, modeling_glm5_next.py. The texts' tokens are divided into pools of
index_kpool. A whole pool has the key

    sum over its tokens j of  softmax over j (gate[j] + ape[j]) · k[j],  channel by channel

and a token sees the index_topk / index_kpool pools with the largest scores, and all tokens after
the last whole pool. In the plane of keys the last token of a pool has the pool's key:

    token      0  1  2  3 │ 4  5  6  7 │ 8  9          index_kpool 4
    stored     a  a  a  P │ a  a  a  P │ a  a          a: [k | gate], P: [key of the pool | 0]

Only a whole pool needs what its last token had. A text that ends before that token writes it again.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from moeinf.models.base import Parts
from moeinf.models.layers.indexer import Indexer, IndexerShape, largest
from moeinf.models.layers.kv_cache import KvCache, PassRows
from moeinf.models.layers.kv_q8 import quantised


class PooledIndexer(Indexer):
    """The indexer of one layer. Its keys and gates are a plane of the KV cache, 2 · W wide."""

    def __init__(
        self, plane: int, shape: IndexerShape, hidden: int, q_lora: int, parts: Parts, prefix: str
    ) -> None:
        """Build the indexer `prefix`.*; plane: of its keys, see KvCache.planes."""
        super().__init__(plane, shape, hidden, q_lora, parts, prefix)
        name = f"{prefix}.index_kpool_compress"
        self._gate = parts.tensor(f"{name}_gate", shape.width, hidden)
        self._ape = parts.tensor(f"{name}_ape", shape.pool, shape.width).float()

    def _remember(self, x: Tensor, rows: PassRows) -> None:
        """Write the keys and gates of all rows, then the keys of the pools that they complete."""
        pool = self._shape.pool
        keys = self._k_norm(self._k(x))
        for span in rows.spans:  # torch may give a row other bits in another number of rows
            both = torch.cat((keys[span.rows], functional.linear(x[span.rows], self._gate)), -1)
            span.cache.write(self._plane, span.past, both[:, None])
            first, last = (at // pool * pool for at in (span.past, span.past + span.count))
            if first < last:
                self._complete(span.cache, first, last)

    def _complete(self, cache: KvCache, first: int, last: int) -> None:
        """Store the keys of the pools of tokens first … last - 1."""
        (stored,) = cache.planes(self._plane)
        pool = self._shape.pool
        both = cache.values(stored[0, first:last], 2 * self._shape.width)
        keys, gates = torch.unflatten(both, 0, (-1, pool)).chunk(2, -1)  # [p, pool, W] each
        chances = (gates.float() + self._ape).softmax(1).to(keys.dtype)
        key = (chances * keys).sum(1)  # [p, W]
        rows = torch.cat((key, torch.zeros_like(key)), -1)
        rows = rows if cache.layout.form == "full" else quantised(rows)
        stored[0, first + pool - 1 : last : pool] = rows

    def _keys(self, cache: KvCache, pools: slice) -> Tensor:
        """Return the keys [p, W] of some pools."""
        (stored,) = cache.planes(self._plane)
        pool, width = self._shape.pool, self._shape.width
        return cache.values(stored[0, pool - 1 :: pool][pools], 2 * width)[:, :width]

    def _places(self, scores: Tensor, total: int) -> Tensor:
        """Return places [n, reach]: of the chosen pools, then from the last whole pool on.

        A token sees those after the last whole pool up to itself.
        """
        pool = self._shape.pool
        inside = torch.arange(pool, device=scores.device, dtype=torch.int32)
        chosen = largest(scores, self._shape.top // pool)[..., None] * pool + inside
        seen = torch.arange(total - len(scores), total, device=scores.device) + 1
        after = (seen // pool * pool).int()[:, None] + inside[: pool - 1]
        return torch.cat((chosen.flatten(1), after), -1)
