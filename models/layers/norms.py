"""RMSNorm and LayerNorm, in the order of operations that the released models were trained with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moeinf.models.base import Parts


@dataclass(frozen=True)
class RmsNorm:
    """x / sqrt(mean(x²) + eps) in float32, cast to x's dtype, then times the weight [D]."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Map […, D] to […, D]."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


@dataclass(frozen=True)
class WideRmsNorm:
    """RmsNorm with the weight [D], in float32 or in x's dtype, multiplied before the cast."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Map […, D] to […, D]."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


def centred_norm(parts: Parts, prefix: str, width: int, eps: float) -> WideRmsNorm:
    """Return the norm of `prefix`.weight, which stores the weight minus 1."""
    return WideRmsNorm(1.0 + parts.tensor(f"{prefix}.weight", width).float(), eps)


@dataclass(frozen=True)
class LayerNorm:
    """(x - mean(x)) / sqrt(var(x) + eps) times the weight [D], plus the bias [D]."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Map […, D] to […, D]."""
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def layer_norm(parts: Parts, prefix: str, width: int, eps: float) -> LayerNorm:
    """Return the norm of `prefix`.weight and `prefix`.bias."""
    weight, bias = (parts.tensor(f"{prefix}.{name}", width) for name in ("weight", "bias"))
    return LayerNorm(weight, bias, eps)


@dataclass(frozen=True)
class HeadNorm:
    """One RMSNorm for each head of a projection; its weight is as wide as a head."""

    norm: RmsNorm | WideRmsNorm

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, heads·W] to [T, heads·W]."""
        heads = torch.unflatten(x, -1, (-1, len(self.norm.weight)))  # [T, heads, W]
        return self.norm(heads).flatten(-2)
