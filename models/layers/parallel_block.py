"""A block whose experts run beside its other parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeinf.models.base import Experts
from moeinf.models.layers.kv_cache import PassRows, Piece
from moeinf.models.layers.moe import SparseFfn


@dataclass(frozen=True)
class ParallelBlock:
    """h = x + attention(norm(x)); out = h + residual(norm(h)) + ffn(norm(x)), as in arctic.

    The experts read x, not h: they are submitted first and load while the rest runs.
    """

    attention_norm: Callable[[Tensor], Tensor]
    attention: Callable[[Tensor, PassRows], Tensor]
    residual_norm: Callable[[Tensor], Tensor]
    residual: Callable[[Tensor], Tensor]
    ffn_norm: Callable[[Tensor], Tensor]
    ffn: SparseFfn

    def __call__(self, x: Tensor, rows: PassRows, experts: Experts) -> Tensor:
        """Map [T, D] to [T, D]."""
        pending = self.ffn.start(self.ffn_norm(x), experts)
        return self._rest(x, rows) + pending.result()

    def over(self, x: Tensor, pieces: Sequence[Piece], experts: Experts) -> Tensor:
        """Map x [T, D], which is overwritten, to [T, D]: each piece as if it were a pass."""
        normed = torch.cat([self.ffn_norm(x[at]) for at, _ in pieces])
        pending = self.ffn.start(normed, experts, [at for at, _ in pieces])
        for at, rows in pieces:
            x[at] = self._rest(x[at], rows)
        return x + pending.result()

    def _rest(self, x: Tensor, rows: PassRows) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rows)
        return x + self.residual(self.residual_norm(x))
