"""Least frequently used: the policy that the paper's public code runs.

Counts are kept for absent cells too, and never age.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.policy.base import Evictable, Passive, Setup, Weights, chosen_cells, lowest

_ABSENT = int(np.iinfo(np.int64).max)
_USE = 1 << 40  # a key is uses · 2^40 + time of the last use, so that ties go to the oldest
_MOST_USES = _ABSENT // _USE - 1  # larger counts are capped here, or keys would wrap


class Lfu(Passive):
    """Evict the resident cell with the fewest uses; among equals, the one used longest ago."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._keys = [0] * setup.cells
        self._resident = np.full(setup.cells, _ABSENT, np.int64)  # keys of resident cells
        self._time = 0

    def routed(
        self, layer: int, ids: NDArray[np.integer[Any]], weights: Weights | None = None
    ) -> None:
        for cell in chosen_cells(layer, ids, self.setup.shape.experts):
            self._time += 1
            uses = min(self._keys[cell] // _USE + 1, _MOST_USES)
            key = self._keys[cell] = uses * _USE + self._time
            if self._resident[cell] != _ABSENT:
                self._resident[cell] = key

    def admitted(self, cell: int) -> None:
        self.insertions += 1
        self._resident[cell] = self._keys[cell]

    def victim(self, evictable: Evictable) -> int | None:
        cell = lowest(self._resident, evictable)
        if cell is not None:
            self._resident[cell] = _ABSENT
        return cell

    def forget(self, cells: Iterable[int]) -> None:
        self._resident[list(cells)] = _ABSENT
