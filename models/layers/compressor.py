"""Pool the tokens of a text into few keys (DeepSeek-V4, sections 2.3.1 and 2.3.2).

A token gives a vector and a gate per channel. Every `rate` tokens are a window, and a window gives
one entry: the sum of its vectors, weighted by a softmax of gates plus the bias of their place. Then
come a norm, and the rope of the window's first token.

    heavily compressed   window w      entry w = pool of window w
    sparse, overlapping  w - 1 and w   a token has two vectors: entry w = pool of the first ones of
                                       window w - 1 and the second ones of window w

Entries are rows of a coarse plane of the KV cache. The vectors and gates that later entries need
are recurrent memory: those of the open window, and with overlap of the window before it.

Math as in transformers 5.23, modeling_deepseek_v4.py, in float32 after the two products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeinf.models.base import Parts
from moeinf.models.layers.kv_cache import KvCache
from moeinf.models.layers.norms import WideRmsNorm
from moeinf.models.layers.rope import Rope, rotate_pairs


@dataclass(frozen=True)
class PoolShape:
    """Sizes of a compressor."""

    width: int  # of an entry
    rate: int  # tokens per entry
    overlap: bool
    rope: int  # the last values of an entry, which rotate
    eps: float

    @property
    def channels(self) -> int:
        """The values of a token: its vectors, then its gates."""
        return 2 * self.width * (2 if self.overlap else 1)

    @property
    def memory(self) -> tuple[int, int]:
        """The shape of the recurrent memory: tokens and channels."""
        return self.rate * (2 if self.overlap else 1), self.channels

    def first(self, tokens: int) -> int:
        """Return the first token that entries after so many tokens still need."""
        open_window = tokens // self.rate * self.rate
        return max(0, open_window - self.rate) if self.overlap else open_window


class Compressor:
    """One compressor of a layer. Its entries are the coarse plane `plane`."""

    def __init__(
        self, plane: int, shape: PoolShape, rope: Rope, hidden: int, parts: Parts, prefix: str
    ) -> None:
        """Build the compressor `prefix`.*."""
        half = shape.channels // 2
        self.plane, self.shape, self._rope = plane, shape, rope
        self._vectors = parts.linear(f"{prefix}.wkv", half, hidden)
        self._gates = parts.linear(f"{prefix}.wgate", half, hidden)
        self._bias = parts.tensor(f"{prefix}.ape", shape.rate, half)
        weight = parts.tensor(f"{prefix}.norm.weight", shape.width)
        self._norm = WideRmsNorm(weight, shape.eps)

    def tokens(self, x: Tensor) -> Tensor:
        """Map x [T, D] to vectors and gates [T, channels] float32."""
        return torch.cat((self._vectors(x), self._gates(x)), -1).float()

    def pooled(self, cache: KvCache, past: int, held: Tensor, new: Tensor) -> Known:
        """Write the entries of the windows that new tokens [n, channels] close.

        held: the recurrent memory after `past` tokens.
        """
        shape, first, stop = self.shape, self.shape.first(past), past + len(new)
        known = Known(shape, torch.cat((held[: past - first], new)), first)
        begin, end = past // shape.rate, stop // shape.rate
        if begin < end:
            entries = self._entries(known, begin, end)
            cache.write_coarse(self.plane, begin, entries.to(cache.layout.dtype))
        return known

    def _entries(self, known: Known, begin: int, end: int) -> Tensor:
        """Return the entries [n, width] float32 of the windows begin … end - 1."""
        rate, width = self.shape.rate, self.shape.width
        if not self.shape.overlap:
            vectors, gates = self._windows(known, begin, end)
        else:
            before = max(begin - 1, 0)
            vectors, gates = self._windows(known, before, end)  # [n + 1, rate, 2·width]
            if begin == 0:  # the first window has none before it
                vectors = torch.cat((torch.zeros_like(vectors[:1]), vectors))
                gates = torch.cat((torch.full_like(gates[:1], -torch.inf), gates))
            vectors, gates = (
                torch.cat((y[:-1, :, :width], y[1:, :, width:]), 1) for y in (vectors, gates)
            )
        entries = self._norm((vectors * gates.softmax(1)).sum(1))  # [n, width]
        at = torch.arange(begin, end, device=entries.device) * rate
        return turned(entries[:, None], *self._rope(at), self.shape.rope)[:, 0]

    def _windows(self, known: Known, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Return the vectors and the biased gates of windows, [end - begin, rate, …] each."""
        rate = self.shape.rate
        rows = known.rows[begin * rate - known.first : end * rate - known.first]
        vectors, gates = torch.unflatten(rows, 0, (-1, rate)).chunk(2, -1)
        return vectors, gates + self._bias.float()


@dataclass(frozen=True)
class Known:
    """The vectors and gates of the tokens from `first` on."""

    shape: PoolShape
    rows: Tensor  # [n, channels]
    first: int

    def memory(self, tokens: int) -> Tensor:
        """Return the recurrent memory after so many tokens of the text."""
        rows = self.rows[self.shape.first(tokens) - self.first : tokens - self.first]
        memory = rows.new_zeros(self.shape.memory)
        memory[: len(rows)] = rows
        return memory


def turned(y: Tensor, cos: Tensor, sin: Tensor, width: int) -> Tensor:
    """Rotate the last `width` values of y [T, heads, W] in pairs."""
    still, last = y[..., :-width], y[..., -width:]
    return torch.cat((still, rotate_pairs(last, cos, sin)), -1)
