"""SIEVE: one queue by age of arrival, one mark per cell, and a hand that evicts the unmarked.

Source: Zhang et al., NSDI 2024. A use marks a cell. The hand goes from the oldest to the newest
cell, takes marks away, and stops at the first unmarked one, which leaves. It goes on from there.
Differences: a cell in use is skipped and keeps its mark.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.policy.base import Evictable, Passive, Setup, Weights, chosen_cells


class Sieve(Passive):
    """Evict the next cell that was not used since the hand last passed."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._queue: list[int] = []  # the oldest arrival first
        self._marked: dict[int, bool] = {}  # resident cells
        self._hand = 0

    def routed(
        self, layer: int, ids: NDArray[np.integer[Any]], weights: Weights | None = None
    ) -> None:
        for cell in chosen_cells(layer, ids, self.setup.shape.experts):
            if cell in self._marked:
                self._marked[cell] = True

    def admitted(self, cell: int) -> None:
        self.insertions += 1
        self._queue.append(cell)
        self._marked[cell] = False

    def victim(self, evictable: Evictable) -> int | None:
        for _ in range(2 * len(self._queue)):  # the second time, no mark is left
            if self._hand >= len(self._queue):
                self._hand = 0
            cell = self._queue[self._hand]
            if evictable(cell):
                if not self._marked[cell]:
                    self._remove(cell)
                    return cell
                self._marked[cell] = False
            self._hand += 1
        return None

    def forget(self, cells: Iterable[int]) -> None:
        for cell in cells:
            if cell in self._marked:
                self._remove(cell)

    def _remove(self, cell: int) -> None:
        place = self._queue.index(cell)
        del self._queue[place], self._marked[cell]
        self._hand -= place < self._hand
