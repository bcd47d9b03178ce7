"""Hyper-connections: a residual of several streams, which each layer mixes into one input.

Math as in transformers 5.23, modeling_qwen4_exp.py (Qwen4ExpTextGatedResidual). With n streams
x [S, D], normed one by one, a gate for each number of each stream, and a rate for each stream:

    gates = σ(up(silu(down(n) / S)))      input  = mean over s of gates[s] · n[s]
    rates = 2 σ(inject(n) / S)            x[s]  += rates[s] · layer(input)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moeinf.models.base import Experts, Linear, Parts
from moeinf.models.layers.kv_cache import PassRows, Piece
from moeinf.models.layers.moe import SparseFfn
from moeinf.models.layers.norms import WideRmsNorm


@dataclass(frozen=True)
class StreamShape:
    """The streams of a residual. rank: of the matrices that make the gates."""

    streams: int
    hidden: int
    rank: int
    eps: float

    @property
    def width(self) -> int:
        return self.streams * self.hidden


def stream_norm(parts: Parts, prefix: str, shape: StreamShape) -> WideRmsNorm:
    """Return the norm [T, S, D] -> [T, S, D] of each stream; it stores its weight minus 1."""
    weight = 1.0 + parts.tensor(f"{prefix}.weight", shape.width).float()
    return WideRmsNorm(weight.view(shape.streams, shape.hidden), shape.eps)


class StreamMix:
    """The map from streams [T, S, D] to the input of a layer [T, D]."""

    def __init__(self, parts: Parts, prefix: str, shape: StreamShape) -> None:
        self._shape = shape
        self._norm = stream_norm(parts, f"{prefix}.hc_norm", shape)
        down, up = (f"{prefix}.input_mix_weight_{which}" for which in ("down", "up"))
        self._down: Linear = parts.linear(down, shape.rank, shape.width)
        self._up: Linear = parts.linear(up, shape.width, shape.rank)

    def normed(self, x: Tensor) -> Tensor:
        """Return the normed streams [T, S, D]."""
        return self._norm(x)

    def mixed(self, normed: Tensor) -> Tensor:
        """Return the mean of normed streams [T, S, D] by their gates: [T, D]."""
        narrow = functional.silu(self._down(normed.flatten(1)) / self._shape.streams)
        gates = self._up(narrow).sigmoid().view(normed.shape)
        return (gates * normed).mean(1)

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, S, D] to [T, D]."""
        return self.mixed(self.normed(x))


class StreamInjection(StreamMix):
    """A StreamMix that also gives the rate at which a layer's output enters each stream."""

    def __init__(self, parts: Parts, prefix: str, shape: StreamShape) -> None:
        super().__init__(parts, prefix, shape)
        self._inject: Linear = parts.linear(
            f"{prefix}.block_inject_weight", shape.streams, shape.width
        )

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map x [T, S, D] to a layer's input [T, D] and the rates [T, S]."""
        normed = self.normed(x)
        rates = self._inject(normed.flatten(1)) / self._shape.streams
        return self.mixed(normed), 2 * rates.sigmoid()


@dataclass(frozen=True)
class StreamBlock:
    """A layer of attention and a feed-forward layer between streams.

    before: a change of the streams before both, from the rows of a pass.
    """

    attention_streams: StreamInjection
    attention: Callable[[Tensor, PassRows], Tensor]
    ffn_streams: StreamInjection
    ffn: SparseFfn
    before: Callable[[Tensor, PassRows], Tensor] | None = None

    def __call__(self, x: Tensor, rows: PassRows, experts: Experts) -> Tensor:
        """Map [T, S, D] to [T, S, D]."""
        x = self._attended(x, rows)
        inner, rates = self.ffn_streams.split(x)
        return _injected(x, self.ffn(inner, experts), rates)

    def over(self, x: Tensor, pieces: Sequence[Piece], experts: Experts) -> Tensor:
        """Map x [T, S, D], which is overwritten, to [T, S, D]: each piece as if it were a pass."""
        cuts, split = [at for at, _ in pieces], []
        for at, rows in pieces:
            x[at] = self._attended(x[at], rows)
            split.append(self.ffn_streams.split(x[at]))
        change = self.ffn.over(torch.cat([inner for inner, _ in split]), cuts, experts)
        for at, (_, rates) in zip(cuts, split, strict=True):
            x[at] = _injected(x[at], change[at], rates)
        return x

    def _attended(self, x: Tensor, rows: PassRows) -> Tensor:
        if self.before is not None:
            x = x + self.before(x, rows)
        inner, rates = self.attention_streams.split(x)
        return _injected(x, self.attention(inner, rows), rates)


def _injected(x: Tensor, change: Tensor, rates: Tensor) -> Tensor:
    """Return the streams x [T, S, D] plus change [T, D], at the rates [T, S]."""
    return x + change[:, None] * rates[..., None]
