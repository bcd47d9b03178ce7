"""Attention to the last tokens and to pooled entries of all before (DeepSeek-V4, section 2.3).

All heads share one vector per token, which is key and value. A token sees the vectors of a window,
itself included, and the entries of its layer's compressor whose tokens are not after it:

    sliding              window
    heavily compressed   window + every entry
    compressed sparse    window + the index_topk entries that an indexer scores highest

The values are rotated, so the output is rotated back by the token's own angle. Groups of heads go
through a matrix each before the last projection.

Where an indexer has more entries than it may choose, a token attends alone, to what it has chosen.

Math as in transformers 5.23, modeling_deepseek_v4.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from moeinf.models.base import Parts
from moeinf.models.config import require
from moeinf.models.layers.attention import SCRATCH_BYTES, attend_one
from moeinf.models.layers.compressor import Compressor, Known, turned
from moeinf.models.layers.indexer import largest
from moeinf.models.layers.kv_cache import KvCache, PassRows, Span
from moeinf.models.layers.norms import WideRmsNorm

_ROWS = 64  # that attend at once: the keys of their windows overlap


@dataclass(frozen=True)
class SharedShape:
    """Sizes by their config keys."""

    heads: int  # num_attention_heads
    head_dim: int
    rope: int  # qk_rope_head_dim: the last values of a head, which rotate
    q_lora: int  # q_lora_rank
    window: int  # sliding_window
    groups: int  # o_groups
    o_lora: int  # o_lora_rank
    eps: float

    def __post_init__(self) -> None:
        require(
            0 < self.rope <= self.head_dim and self.rope % 2 == 0,
            f"{self.rope} of {self.head_dim} dimensions cannot be rotated",
        )
        require(
            self.heads % self.groups == 0,
            f"{self.heads} heads do not form {self.groups} groups",
        )


@dataclass(frozen=True)
class ScorerShape:
    """Sizes of an indexer by their config keys."""

    heads: int  # index_n_heads
    width: int  # index_head_dim
    top: int  # index_topk


class EntryIndexer:
    """Scores the entries of a layer by a second compressor's, which are narrow."""

    def __init__(
        self,
        shape: ScorerShape,
        compressor: Compressor,
        hidden: int,
        q_lora: int,
        parts: Parts,
        prefix: str,
    ) -> None:
        """Build the indexer `prefix`.* around its compressor."""
        self.shape, self.compressor = shape, compressor
        self._q = parts.linear(f"{prefix}.wq_b", shape.heads * shape.width, q_lora)
        self._weights = parts.tensor(f"{prefix}.weights_proj.weight", shape.heads, hidden)

    def queries(self, narrow: Tensor, rows: PassRows) -> Tensor:
        """Map narrow [T, q_lora] to queries [T, heads, width]."""
        q = torch.unflatten(self._q(narrow), -1, (self.shape.heads, -1))
        return turned(q, rows.cos, rows.sin, self.compressor.shape.rope)

    def chosen(self, x: Tensor, query: Tensor, cache: KvCache, entries: int) -> Tensor:
        """Return the places [top] of the best of the first entries, ascending, for one token.

        x [D], query [heads, width]. The first of several equal scores are taken.
        """
        (stored,) = cache.planes(self.compressor.plane)
        keys = cache.values(stored[0, :entries], self.shape.width).float()  # [E, width]
        weights = functional.linear(x[None].float(), self._weights.float())  # [1, heads]
        weights = weights * (self.shape.heads * self.shape.width) ** -0.5
        scores = weights @ (query.float() @ keys.mT).relu()  # [1, E]
        return largest(scores.nan_to_num(0.0, torch.inf, -torch.inf), self.shape.top)[0]


class SharedKvAttention:
    """Attention of one layer, with a compressor or without."""

    def __init__(
        self,
        layer: int,
        shape: SharedShape,
        hidden: int,
        parts: Parts,
        prefix: str,
        compressor: Compressor | None = None,
        indexer: EntryIndexer | None = None,
        memory: int = 0,
        rope: int = 0,
    ) -> None:
        """Build layer `layer` from `prefix`.*.

        memory: the layer's number among those with a compressor. rope: see PassRows.turned_by.
        """
        heads, wide = shape.heads, shape.heads * shape.head_dim
        self._layer, self._shape, self._memory, self._rope = layer, shape, memory, rope
        self._compressor, self._indexer = compressor, indexer
        self._pools = [compressor] if compressor is not None else []
        if indexer is not None:
            self._pools.append(indexer.compressor)
        self._q_a = parts.linear(f"{prefix}.wq_a", shape.q_lora, hidden)
        self._q_norm = _norm(parts, f"{prefix}.q_norm", shape.q_lora, shape.eps)
        self._q_b = parts.linear(f"{prefix}.wq_b", wide, shape.q_lora)
        self._kv = parts.linear(f"{prefix}.wkv", shape.head_dim, hidden)
        self._kv_norm = _norm(parts, f"{prefix}.kv_norm", shape.head_dim, shape.eps)
        self._sinks = parts.tensor(f"{prefix}.attn_sink", heads)
        narrow = shape.groups * shape.o_lora
        weight = parts.tensor(f"{prefix}.wo_a.weight", narrow, wide // shape.groups)
        self._o_a = parts.tuned(GroupedLinear(weight.view(shape.groups, shape.o_lora, -1)))
        self._o_b = parts.linear(f"{prefix}.wo_b", hidden, narrow)

    def __call__(self, x: Tensor, rows: PassRows) -> Tensor:
        """Map x [T, D] to [T, D]; write each request's vectors and entries into its cache."""
        shape, rows = self._shape, rows.turned_by(self._rope)
        narrow = self._q_norm(self._q_a(x))
        q = _unit(torch.unflatten(self._q_b(narrow), -1, (shape.heads, -1)), shape.eps)
        q = turned(q, rows.cos, rows.sin, shape.rope)  # [T, H, W]
        kv = self._kv_norm(self._kv(x))[:, None]
        kv = turned(kv, rows.cos, rows.sin, shape.rope)  # [T, 1, W]
        given = [pool.tokens(x) for pool in self._pools]
        asking = None if self._indexer is None else self._indexer.queries(narrow, rows)
        out = torch.empty_like(q)
        for span in rows.spans:
            at = span.rows
            span.cache.write(self._layer, span.past, kv[at])
            if given:
                memory = span.cache.recurrent
                assert memory is not None
                memory.run(span.past, partial(self._pooled, span, [y[at] for y in given]))
            near = span.count
            if self._indexer is not None and self._compressor is not None:
                few = (self._indexer.shape.top + 1) * self._compressor.shape.rate - 1
                near = min(max(few - span.past, 0), span.count)
            self._near(q[at][:near], span, out[at][:near])
            for row in range(near, span.count):
                assert asking is not None
                inputs = q[at][row], x[at][row], asking[at][row]
                out[at][row] = self._far(*inputs, span.cache, span.past + row)
        out = turned(out, rows.cos, -rows.sin, shape.rope)
        grouped = torch.unflatten(out.flatten(1), -1, (shape.groups, -1))
        # torch may give a row other bits in another number of rows
        return self._o_b(torch.cat([self._o_a(grouped[span.rows]) for span in rows.spans]))

    def _pooled(self, span: Span, given: Sequence[Tensor]) -> None:
        """Write the entries of a span, and the memory after it."""
        cache, past, stop = span.cache, span.past, span.past + span.count
        memory = cache.recurrent
        assert memory is not None
        held = memory.read(self._memory, past)
        known: list[Known] = [
            pool.pooled(cache, past, mine, new)
            for pool, mine, new in zip(self._pools, held, given, strict=True)
        ]
        mark = memory.mark_within(past, stop)
        if mark is not None:
            memory.mark(self._memory, [one.memory(mark) for one in known])
        for target, one in zip(memory.next(self._memory), known, strict=True):
            target.copy_(one.memory(stop))

    def _near(self, q: Tensor, span: Span, out: Tensor) -> None:
        """Attend with the first rows q [n, H, W] of a span to all that they see; write into out."""
        shape, start = self._shape, 0
        rate = 0 if self._compressor is None else self._compressor.shape.rate
        while start < len(q):
            past = span.past + start
            first = max(0, past + 1 - shape.window)
            keys = past + _ROWS - first + (0 if not rate else (past + _ROWS) // rate)
            step = max(1, min(_ROWS, SCRATCH_BYTES // (8 * shape.heads * keys)))
            some = q[start : start + step]
            total = past + len(some)
            entries = total // rate if rate else 0
            kv = self._keys(span.cache, first, total, slice(0, entries))
            if len(some) == 1:
                out[start] = self._one(some[0], kv)
            else:
                at = torch.arange(past, total, device=q.device)[:, None]
                token = torch.arange(first, total, device=q.device)
                seen = (token <= at) & (token > at - shape.window)
                if rate:
                    entry = torch.arange(entries, device=q.device)
                    seen = torch.cat((seen, entry < (at + 1) // rate), 1)
                out[start : start + len(some)] = self._masked(some, kv, seen)
            start += len(some)

    def _far(self, q: Tensor, x: Tensor, query: Tensor, cache: KvCache, past: int) -> Tensor:
        """Return the attention [H, W] of the token after `past`, which chooses its entries."""
        assert self._compressor is not None
        assert self._indexer is not None
        entries = (past + 1) // self._compressor.shape.rate
        places = self._indexer.chosen(x, query, cache, entries)
        first = max(0, past + 1 - self._shape.window)
        return self._one(q, self._keys(cache, first, past + 1, places.long()))

    def _keys(self, cache: KvCache, first: int, stop: int, entries: slice | Tensor) -> Tensor:
        """Return the vectors of tokens, then some entries: [S, W]."""
        width = self._shape.head_dim
        (stored,) = cache.planes(self._layer)
        window = cache.values(stored[0, first:stop], width)
        if self._compressor is None:
            return window
        (pooled,) = cache.planes(self._compressor.plane)
        return torch.cat((window, cache.values(pooled[0][entries], width)))

    def _one(self, q: Tensor, kv: Tensor) -> Tensor:
        """Return the attention [H, W] of a token q [H, W] to all of kv [S, W]."""
        scale, keys = self._shape.head_dim**-0.5, kv[None]
        return attend_one(q[None], keys, keys, scale, self._sinks[None])[0]

    def _masked(self, q: Tensor, kv: Tensor, seen: Tensor) -> Tensor:
        """Return the attention [n, H, W] of q [n, H, W] to kv [S, W] where seen [n, S]."""
        keys = kv.float()
        scores = (q.float() * self._shape.head_dim**-0.5) @ keys.mT  # [n, H, S]
        scores = scores.masked_fill_(~seen[:, None], -torch.inf)
        sinks = self._sinks.float()[None, :, None].expand(len(q), -1, 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        return (weights @ keys).to(q.dtype)


@dataclass(frozen=True)
class GroupedLinear:
    """A matrix for each group of a row's values: weight [G, out, in]."""

    weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, G, in] to [T, G·out]."""
        return (x.transpose(0, 1) @ self.weight.mT).transpose(0, 1).flatten(1)


def _norm(parts: Parts, prefix: str, width: int, eps: float) -> WideRmsNorm:
    return WideRmsNorm(parts.tensor(f"{prefix}.weight", width), eps)


def _unit(x: Tensor, eps: float) -> Tensor:
    """Return x [T, H, W] with heads of unit mean square."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
