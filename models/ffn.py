"""Gated feed-forward networks: one expert's arithmetic, and the dense one.

Does not know routing, nor where weights come from.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from moeinf.models.base import Linear, Parts


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """down @ (silu(gate @ x) * (up @ x)) per row of x [T, D] -> [T, D].

    gate_up [2F, D] holds the gate's rows first; down [D, F].
    """
    gate, up = functional.linear(x, gate_up).chunk(2, dim=-1)  # [T, F] each
    return functional.linear(functional.silu(gate) * up, down)


@dataclass(frozen=True)
class GatedMlp:
    """The same with dense weights: a dense layer, or shared experts joined into one."""

    gate: Linear
    up: Linear
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def gated_mlp(parts: Parts, prefix: str, hidden: int, intermediate: int) -> GatedMlp:
    """From `prefix`.{gate,up,down}_proj.weight."""
    return GatedMlp(
        gate=parts.linear(f"{prefix}.gate_proj", intermediate, hidden),
        up=parts.linear(f"{prefix}.up_proj", intermediate, hidden),
        down=parts.linear(f"{prefix}.down_proj", hidden, intermediate),
    )
