"""Dense weights in the host's memory: native kernels, and torch where those do not reach.

Does not know names of tensors or files.
"""

from __future__ import annotations

import torch

from moeinf.runtime import linears
from moeinf.runtime.tuned import tuned


class CpuMath:
    """A `linears.DenseMath`."""

    place = torch.device("cpu")
    tiled_linear = staticmethod(linears.tiled_linear)
    plain_linear = staticmethod(linears.plain_linear)
    tiled_embedding = staticmethod(linears.tiled_embedding)
    tuned = staticmethod(tuned)
