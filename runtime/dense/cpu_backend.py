"""Dense weights in host memory: native kernels, with torch as the fallback."""

from __future__ import annotations

from typing import cast

import torch

from moeinf.models.base import Piece
from moeinf.models.layers.decoder import Block
from moeinf.runtime.dense import cpu_linear
from moeinf.runtime.dense.cpu_block import joined, tuned_block
from moeinf.runtime.dense.cpu_fused import tuned


class CpuMath:
    """A `linears.DenseMath`."""

    place = torch.device("cpu")
    tiled_linear = staticmethod(cpu_linear.tiled_linear)
    plain_linear = staticmethod(cpu_linear.plain_linear)
    tiled_embedding = staticmethod(cpu_linear.tiled_embedding)

    def tuned(self, piece: Piece) -> Piece:
        """See models.base.Parts.tuned."""
        if isinstance(piece, tuple):
            return cast(Piece, joined(piece))
        return cast(Piece, tuned_block(piece)) if isinstance(piece, Block) else tuned(piece)
