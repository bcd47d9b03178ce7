"""A block with a norm before and a norm after each of its two parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeinf.models.base import Experts
from moeinf.models.layers.kv_cache import PassRows, Piece
from moeinf.models.layers.moe import SparseFfn


@dataclass(frozen=True)
class SandwichBlock:
    """h = x + norm(attention(norm(x))); out = (h + norm(ffn(h))) · scalar, as in Gemma 4.

    The feed-forward layer norms its input itself: each of its parts has a norm of its own.
    """

    attention_norm: Callable[[Tensor], Tensor]
    attention: Callable[[Tensor, PassRows], Tensor]
    after_attention_norm: Callable[[Tensor], Tensor]
    ffn: SparseFfn
    after_ffn_norm: Callable[[Tensor], Tensor]
    scalar: Tensor  # [1]

    def __call__(self, x: Tensor, rows: PassRows, experts: Experts) -> Tensor:
        """Map [T, D] to [T, D]."""
        x = self._attended(x, rows)
        return self._joined(x, self.ffn(x, experts))

    def over(self, x: Tensor, pieces: Sequence[Piece], experts: Experts) -> Tensor:
        """Map x [T, D], which is overwritten, to [T, D]: each piece as if it were a pass."""
        cuts = [at for at, _ in pieces]
        for at, rows in pieces:
            x[at] = self._attended(x[at], rows)
        change = self.ffn.over(x, cuts, experts)
        return torch.cat([self._joined(x[at], change[at]) for at in cuts])

    def _attended(self, x: Tensor, rows: PassRows) -> Tensor:
        return x + self.after_attention_norm(self.attention(self.attention_norm(x), rows))

    def _joined(self, x: Tensor, change: Tensor) -> Tensor:
        return (x + self.after_ffn_norm(change)) * self.scalar
