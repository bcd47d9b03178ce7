"""Decoder layers that are half a Block: one norm, and attention or a feed-forward network alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeinf.models.base import Experts
from moeinf.models.layers.kv_cache import PassRows, Piece
from moeinf.models.layers.moe import SparseFfn


@dataclass(frozen=True)
class MixerBlock:
    """x += attention(norm(x))."""

    attention_norm: Callable[[Tensor], Tensor]
    attention: Callable[[Tensor, PassRows], Tensor]

    def __call__(self, x: Tensor, rows: PassRows, experts: Experts) -> Tensor:
        """Map [T, D] to [T, D]."""
        return x + self.attention(self.attention_norm(x), rows)

    def over(self, x: Tensor, pieces: Sequence[Piece], experts: Experts) -> Tensor:
        """Map x [T, D], which is overwritten, to [T, D]: each piece as if it were a pass."""
        for at, rows in pieces:
            x[at] = self(x[at], rows, experts)
        return x


@dataclass(frozen=True)
class FfnBlock:
    """x += ffn(norm(x))."""

    ffn_norm: Callable[[Tensor], Tensor]
    ffn: Callable[[Tensor, Experts], Tensor]

    def __call__(self, x: Tensor, rows: PassRows, experts: Experts) -> Tensor:
        """Map [T, D] to [T, D]."""
        return x + self.ffn(self.ffn_norm(x), experts)

    def over(self, x: Tensor, pieces: Sequence[Piece], experts: Experts) -> Tensor:
        """Map x [T, D], which is overwritten, to [T, D]: each piece as if it were a pass."""
        if not isinstance(self.ffn, SparseFfn):
            for at, rows in pieces:
                x[at] = self(x[at], rows, experts)
            return x
        normed = torch.cat([self.ffn_norm(x[at]) for at, _ in pieces])
        return x + self.ffn.over(normed, [at for at, _ in pieces], experts)
