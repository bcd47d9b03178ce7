"""Least recently used: the baseline that every other policy has to beat.

With fewer slots than one token uses, its hit rate is exactly 0 (the cliff). Every expert leaves
just before its next use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.policy.base import Evictable, Passive, Setup, Weights, chosen_cells


class Lru(Passive):
    """Evict the cell whose last use is the oldest."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._resident: OrderedDict[int, None] = OrderedDict()  # oldest use first

    def routed(
        self, layer: int, ids: NDArray[np.integer[Any]], weights: Weights | None = None
    ) -> None:
        for cell in chosen_cells(layer, ids, self.setup.shape.experts):
            if cell in self._resident:
                self._resident.move_to_end(cell)

    def admitted(self, cell: int) -> None:
        self.insertions += 1
        self._resident[cell] = None

    def victim(self, evictable: Evictable) -> int | None:
        for cell in self._resident:
            if evictable(cell):
                del self._resident[cell]
                return cell
        return None

    def forget(self, cells: Iterable[int]) -> None:
        for cell in cells:
            self._resident.pop(cell, None)
