"""A layer that adds rows of a large table, found by the last few tokens, to the residual.

Math as in transformers 5.23, modeling_qwen4_exp.py (Qwen4ExpTextPLELayer). The rows of a token's
n-grams (ngrams.py), side by side, make a value v [D] and a key k [S, D], one for each stream
x [S, D] of the residual. A gate decides how much of the value enters a stream:

    g[s]  = n(k)[s] · n(x)[s] / √D                  n: a norm of each stream
    y[s]  = σ(sign(g[s]) √max(|g[s]|, 1e-6)) · v
    x[s] += y[s] + silu(conv(n(y)))[s]              conv: over every size-th token before

A request's memory of such a layer is the last tokens, and the last inputs of the convolution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from moeinf.models.base import Linear, Parts
from moeinf.models.layers.hyper_connection import StreamShape, stream_norm
from moeinf.models.layers.kv_cache import PassRows, Span
from moeinf.models.layers.ngrams import Ngrams, NgramShape, histories
from moeinf.models.layers.recurrent import CHUNK, RecurrentMemory

_LEAST_GATE = 1e-6


@dataclass(frozen=True)
class NgramLayerShape:
    """Sizes of the layers with n-grams."""

    ngrams: NgramShape
    streams: StreamShape
    width: int  # ple_embed_dim: of all rows of a token
    kernel: int  # ple_conv_kernel_size

    @property
    def memory(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of a layer's memory: tokens, minus the end token, and inputs."""
        reach = (self.kernel - 1) * self.ngrams.size
        return (self.ngrams.size - 1,), (reach, self.streams.width)


class NgramLayer:
    """One layer, the `number`-th with n-grams; `memory`: its place in a RecurrentMemory."""

    def __init__(
        self, memory: int, number: int, shape: NgramLayerShape, parts: Parts, prefix: str
    ) -> None:
        self._memory, self._shape = memory, shape
        self._ngrams = Ngrams(shape.ngrams, number)
        streams, table = shape.streams, f"{prefix}.ple_embedding.ngram_embedding"
        row = shape.width // shape.ngrams.all_heads
        self._table = parts.table(table, self._ngrams.rows, row)
        self._key: Linear = parts.linear(f"{prefix}.key_proj", streams.width, shape.width)
        self._value: Linear = parts.linear(f"{prefix}.value_proj", streams.hidden, shape.width)
        self._key_norm, self._query_norm, self._conv_norm = (
            stream_norm(parts, f"{prefix}.norm_{name}", streams)
            for name in ("key", "query", "conv")
        )
        conv = parts.tensor(f"{prefix}.conv1d.weight", streams.width, 1, shape.kernel)
        self._conv = conv[:, 0].T.float().contiguous()  # [kernel, S·D]

    def ahead(self, ids: Tensor, spans: Sequence[Span]) -> None:
        """Start to read the rows of a pass with tokens ids [T]."""
        self._table.ahead(self._wanted(ids, spans).flatten())

    def _wanted(self, ids: Tensor, spans: Sequence[Span]) -> Tensor:
        """Return the rows of the table [T, heads] that tokens ids [T] use."""
        found = histories(ids.cpu(), spans, self._before)
        return torch.cat([self._ngrams(history) for _, history in found])

    def _before(self, span: Span) -> Tensor:
        """Return the last tokens before a span."""
        memory = span.cache.recurrent
        assert memory is not None
        tokens, _ = memory.read(self._memory, span.past)
        return tokens.cpu().long() + self._shape.ngrams.end

    def __call__(self, x: Tensor, rows: PassRows) -> Tensor:
        """Map the streams x [T, S, D] to their change; write each request's next memory."""
        streams, query = self._shape.streams, self._query_norm(x)  # while rows are read
        found = self._table.rows(self._wanted(rows.ids, rows.spans).flatten())
        found = found.to(x.device, x.dtype).view(len(x), -1)
        key = self._key_norm(torch.unflatten(self._key(found), -1, (streams.streams, -1)))
        gate = (key * query).sum(-1, keepdim=True) / math.sqrt(streams.hidden)
        gate = gate.abs().clamp_min(_LEAST_GATE).sqrt() * gate.sign()
        value = gate.sigmoid() * self._value(found)[:, None]  # [T, S, D]
        inputs = self._conv_norm(value).flatten(1)  # [T, S·D]
        out = torch.empty_like(inputs)
        for span in rows.spans:
            memory, r = span.cache.recurrent, span.rows
            assert memory is not None
            given = memory, span.past, rows.ids[r], inputs[r], out[r]
            memory.run(span.past, partial(self._run, *given))
        return value + functional.silu(out).view(x.shape)

    def _run(
        self, memory: RecurrentMemory, past: int, ids: Tensor, inputs: Tensor, out: Tensor
    ) -> None:
        """Run the convolution of one request's n rows into out [n, S·D]; write its memory."""
        step = self._shape.ngrams.size
        tokens, recent = memory.read(self._memory, past)
        for start in range(0, len(inputs), CHUNK):
            if memory.is_mark(past + start):
                memory.mark(self._memory, (tokens, recent))
            r = slice(start, min(start + CHUNK, len(inputs)))
            n = r.stop - r.start
            known = torch.cat((recent, inputs[r].float()))  # [(kernel - 1)·size + n, S·D]
            mixed = known[:n] * self._conv[0]
            for tap in range(1, self._shape.kernel):
                mixed += known[tap * step : tap * step + n] * self._conv[tap]
            out[r] = mixed.to(out.dtype)
            recent = known[n:]
            tokens = torch.cat((tokens, (ids[r] - self._shape.ngrams.end).float()))[n:]
        later_tokens, later_recent = memory.next(self._memory)
        later_tokens.copy_(tokens)
        later_recent.copy_(recent)
