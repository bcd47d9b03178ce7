"""Feed-forward networks: one expert's arithmetic, and the gated dense one.

Does not know routing, nor where weights come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moeinf.models.base import Activation, Linear, Parts

_ROWS = 64  # so that F columns of them stay a few MiB: 64 · 2F · 2 bytes is 3.5 MiB in Mixtral


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)  # [t, F] each
    return functional.silu(gate) * up


def _clamped_swiglu(gate_up: Tensor) -> Tensor:
    """gpt-oss's: a gate of at most 7 with a steeper sigmoid, up in -7 … 7 and shifted by 1."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(1.702 * gate))


_ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "swiglu": _swiglu,
    "clamped_swiglu": _clamped_swiglu,
    "relu": functional.relu,
}


def expert_ffn(
    activation: Activation,
    x: Tensor,
    inner: Tensor,
    down: Tensor,
    inner_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """down @ act(inner @ x) per row of x [T, D] -> [T, D], each product plus its bias.

    inner is gate_up [2F, D] with the gate's rows first, or up [F, D] for relu; down is [D, F].
    """
    act = _ACTIVATIONS[activation]

    def block(rows: Tensor) -> Tensor:
        return functional.linear(act(functional.linear(rows, inner, inner_bias)), down, down_bias)

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


@dataclass(frozen=True)
class DenseRelu:
    """down(relu(up(x))) with dense weights."""

    up: Linear
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        return _in_blocks(lambda rows: self.down(functional.relu(self.up(rows))), x)


def gated_shared(parts: Parts, prefix: str, hidden: int, intermediate: int) -> Linear:
    """Qwen's shared expert times sigmoid of its gate, from `prefix`.shared_expert*."""
    expert = gated_mlp(parts, f"{prefix}.shared_expert", hidden, intermediate)
    gate = parts.linear(f"{prefix}.shared_expert_gate", 1, hidden)
    return lambda x: gate(x).sigmoid() * expert(x)


def gated_mlp(parts: Parts, prefix: str, hidden: int, intermediate: int) -> GatedMlp:
    """From `prefix`.{gate,up,down}_proj.weight."""
    mlp = GatedMlp(
        gate=parts.linear(f"{prefix}.gate_proj", intermediate, hidden),
        up=parts.linear(f"{prefix}.up_proj", intermediate, hidden),
        down=parts.linear(f"{prefix}.down_proj", hidden, intermediate),
    )
    return parts.tuned(mlp)
