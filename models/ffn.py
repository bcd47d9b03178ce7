"""Gated feed-forward networks: one expert's arithmetic, and the dense one.

Does not know routing, nor where weights come from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moeinf.models.base import Linear, Parts

_ROWS = 64  # so that F columns of them stay a few MiB: 64 · 2F · 2 bytes is 3.5 MiB in Mixtral


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """down @ (silu(gate @ x) * (up @ x)) per row of x [T, D] -> [T, D].

    gate_up [2F, D] holds the gate's rows first; down [D, F].
    """

    def block(rows: Tensor) -> Tensor:
        gate, up = functional.linear(rows, gate_up).chunk(2, dim=-1)  # [t, F] each
        return functional.linear(functional.silu(gate) * up, down)

    return _in_blocks(block, x)


def _in_blocks(ffn: Linear, x: Tensor) -> Tensor:
    """ffn on at most _ROWS rows at a time: a whole chunk of them may go to one wide expert."""
    if len(x) <= _ROWS:
        return ffn(x)
    return torch.cat([ffn(rows) for rows in torch.split(x, _ROWS)])


@dataclass(frozen=True)
class GatedMlp:
    """The same with dense weights: a dense layer, or shared experts joined into one."""

    gate: Linear
    up: Linear
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        return _in_blocks(
            lambda rows: self.down(functional.silu(self.gate(rows)) * self.up(rows)), x
        )


def gated_mlp(parts: Parts, prefix: str, hidden: int, intermediate: int) -> GatedMlp:
    """From `prefix`.{gate,up,down}_proj.weight."""
    return GatedMlp(
        gate=parts.linear(f"{prefix}.gate_proj", intermediate, hidden),
        up=parts.linear(f"{prefix}.up_proj", intermediate, hidden),
        down=parts.linear(f"{prefix}.down_proj", hidden, intermediate),
    )
