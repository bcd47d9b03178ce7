"""RMSNorm and LayerNorm, in the order of operations that the released models were trained with.

Does not know layers or families.
"""

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
        """[…, D] -> [… , D]."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


@dataclass(frozen=True)
class WideRmsNorm:
    """The same, multiplied with the weight [D], of float32 or of x, before the cast."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """[…, D] -> [… , D]."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


def centred_norm(parts: Parts, prefix: str, width: int, eps: float) -> WideRmsNorm:
    """From `prefix`.weight, which holds what the weight has beyond 1."""
    return WideRmsNorm(1.0 + parts.tensor(f"{prefix}.weight", width).float(), eps)


@dataclass(frozen=True)
class LayerNorm:
    """(x - mean(x)) / sqrt(var(x) + eps) times the weight [D], plus the bias [D]."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """[…, D] -> [… , D]."""
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def layer_norm(parts: Parts, prefix: str, width: int, eps: float) -> LayerNorm:
    """From `prefix`.weight and `prefix`.bias."""
    weight, bias = (parts.tensor(f"{prefix}.{name}", width) for name in ("weight", "bias"))
    return LayerNorm(weight, bias, eps)


@dataclass(frozen=True)
class HeadNorm:
    """One RMSNorm for each head of a projection; its weight is as wide as a head."""

    norm: RmsNorm | WideRmsNorm

    def __call__(self, x: Tensor) -> Tensor:
        """[T, heads·W] -> [T, heads·W]."""
        heads = torch.unflatten(x, -1, (-1, len(self.norm.weight)))  # [T, heads, W]
        return self.norm(heads).flatten(-2)
