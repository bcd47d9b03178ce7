"""LRFU: a use counts less the longer ago it was, between LRU and LFU.

Source: Lee et al., IEEE Transactions on Computers 50 (2001). The value of a block is the sum over
its uses of (1/2)^(λ · age). Here one token is one unit of time, λ is 1 / HALF_LIFE, and counts are
kept for absent cells too, which are few. The order of two values never changes without a use. So
the key is log2(value) + λ · time, and a use at time t makes it log2(2^key + 2^(λ · t)).
"""

from __future__ import annotations

from math import log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.policy.base import Setup, Weights, chosen_cells
from moeinf.offload.policy.ranked import Ranked

HALF_LIFE = 16  # tokens
NEVER = -1e9  # below each key


class Lrfu(Ranked):
    """Evict the cell with the smallest sum of halving uses."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.keys.fill(NEVER)
        self._time = 0.0  # λ · passes

    def routed(
        self, layer: int, ids: NDArray[np.integer[Any]], weights: Weights | None = None
    ) -> None:
        shape = self.setup.shape
        self._time += 1 / (HALF_LIFE * shape.layers)
        now = self._time
        for cell in chosen_cells(layer, ids, shape.experts):
            before = self.keys[cell] - now  # at most some bits: earlier uses weigh less
            self.keys[cell] = now + log2(1 + 2**before)
