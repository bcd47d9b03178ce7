"""Dense weights in host memory: native kernels, with torch as the fallback."""

from __future__ import annotations

import torch

from moeinf.models.base import Piece
from moeinf.runtime.dense import cpu_linear
from moeinf.runtime.dense.cpu_fused import tuned


class CpuMath:
    """A `linears.DenseMath`."""

    place = torch.device("cpu")
    tiled_linear = staticmethod(cpu_linear.tiled_linear)
    plain_linear = staticmethod(cpu_linear.plain_linear)
    tiled_embedding = staticmethod(cpu_linear.tiled_embedding)

    def tuned(self, piece: Piece) -> Piece:
        """See models.base.Parts.tuned."""
        return tuned(piece)
