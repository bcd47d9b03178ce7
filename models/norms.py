"""RMSNorm, in the order of operations that the released models were trained with.

Does not know layers or families.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
