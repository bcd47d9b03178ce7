"""Feed-forward networks: the arithmetic of one expert, and the dense networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moeinf.models.base import Activation, Linear, Parts

_ROWS = 64  # keeps the inner product small: 64 · 2F · 2 bytes is 3.5 MiB in Mixtral


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)  # [t, F] each
    return functional.silu(gate) * up


def _swiglu10(gate_up: Tensor) -> Tensor:
    return _limited(*gate_up.chunk(2, dim=-1))


def _limited(gate: Tensor, up: Tensor) -> Tensor:
    """Apply the SwiGLU of DeepSeek-V4 and GLM-5.3: gate at most 10, up in -10 … 10."""
    return functional.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)


def _clamped_swiglu(gate_up: Tensor) -> Tensor:
    """Apply gpt-oss's SwiGLU: gate at most 7 with a steeper sigmoid, up in -7 … 7, plus 1."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(1.702 * gate))


def _geglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def relu2(up: Tensor) -> Tensor:
    """Return the square of max(up, 0)."""
    return functional.relu(up).square()


_ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "swiglu": _swiglu,
    "swiglu10": _swiglu10,
    "clamped_swiglu": _clamped_swiglu,
    "geglu": _geglu,
    "relu": functional.relu,
    "relu2": relu2,
}


def expert_ffn(
    activation: Activation,
    x: Tensor,
    inner: Tensor,
    down: Tensor,
    inner_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Return down @ act(inner @ x) for each row of x [T, D], each product plus its bias.

    inner is gate_up [2F, D], the gate's rows first, or up [F, D] without a gate; down is [D, F].
    """
    act = _ACTIVATIONS[activation]

    def block(rows: Tensor) -> Tensor:
        return functional.linear(act(functional.linear(rows, inner, inner_bias)), down, down_bias)

    return _in_blocks(block, x)


def _in_blocks(ffn: Linear, x: Tensor) -> Tensor:
    """Run ffn on at most _ROWS rows at a time, because one expert may get a whole chunk."""
    if len(x) <= _ROWS:
        return ffn(x)
    return torch.cat([ffn(rows) for rows in torch.split(x, _ROWS)])


@dataclass(frozen=True)
class GatedMlp:
    """down(silu(gate(x)) · up(x)) with dense weights: a dense layer or joined shared experts."""

    gate: Linear
    up: Linear
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, D] to [T, D]."""
        return _in_blocks(
            lambda rows: self.down(functional.silu(self.gate(rows)) * self.up(rows)), x
        )


@dataclass(frozen=True)
class GeluMlp(GatedMlp):
    """The same with the tanh form of gelu in place of silu."""

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, D] to [T, D]."""
        return _in_blocks(
            lambda rows: self.down(
                functional.gelu(self.gate(rows), approximate="tanh") * self.up(rows)
            ),
            x,
        )


@dataclass(frozen=True)
class LimitedMlp(GatedMlp):
    """The same with the limits of swiglu10."""

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, D] to [T, D]."""
        return _in_blocks(lambda rows: self.down(_limited(self.gate(rows), self.up(rows))), x)


@dataclass(frozen=True)
class FusedMlp:
    """A GatedMlp whose gate and up are one matrix, the gate's rows first."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, D] to [T, D]."""
        return _in_blocks(lambda rows: self.down(_swiglu(self.gate_up(rows))), x)


@dataclass(frozen=True)
class DenseRelu:
    """down(act(up(x))) with dense weights and no gate: act is relu or relu2."""

    up: Linear
    down: Linear
    act: Callable[[Tensor], Tensor] = functional.relu

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, D] to [T, D]."""
        return _in_blocks(lambda rows: self.down(self.act(self.up(rows))), x)


@dataclass(frozen=True)
class SigmoidGate:
    """x times the sigmoid of a gate."""

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """Map x [T, W] and gate [T, W] or [T, 1] to [T, W]."""
        return x * gate.sigmoid()


@dataclass(frozen=True)
class GatedShared:
    """A dense network whose output is multiplied by one gate for each row."""

    expert: Linear
    gate: Linear  # [T, D] -> [T, 1]
    times: Callable[[Tensor, Tensor], Tensor]  # a SigmoidGate, tuned

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, D] to [T, D]."""
        return self.times(self.expert(x), self.gate(x))


def gated_shared(parts: Parts, prefix: str, hidden: int, intermediate: int) -> GatedShared:
    """Return Qwen's shared expert times the sigmoid of its gate: `prefix`.shared_expert*."""
    return GatedShared(
        gated_mlp(parts, f"{prefix}.shared_expert", hidden, intermediate),
        parts.linear(f"{prefix}.shared_expert_gate", 1, hidden),
        parts.tuned(SigmoidGate()),
    )


def gated_mlp(
    parts: Parts, prefix: str, hidden: int, intermediate: int, kind: type[GatedMlp] = GatedMlp
) -> GatedMlp:
    """Return the network of `prefix`.{gate,up,down}_proj.weight, tuned."""
    mlp = kind(
        gate=parts.linear(f"{prefix}.gate_proj", intermediate, hidden),
        up=parts.linear(f"{prefix}.up_proj", intermediate, hidden),
        down=parts.linear(f"{prefix}.down_proj", hidden, intermediate),
    )
    return parts.tuned(mlp)
