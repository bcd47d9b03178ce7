"""The offline optimum: evict the cell that is needed furthest in the future. For the simulator.

Source: Belady (1966), with bypass: the cell that is needed again last leaves first, even if it has
just been read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.policy.base import Evictable, Passive, Setup, Weights, chosen_cells, lowest

_ABSENT = int(np.iinfo(np.int64).max)
_NEVER = _ABSENT - 1


class Belady(Passive):
    """Evict the cell whose next use is furthest away.

    future: every routed event (layer, ids [T, K]) that will come, in order.
    """

    def __init__(
        self, setup: Setup, future: Iterable[tuple[int, NDArray[np.integer[Any]]]]
    ) -> None:
        super().__init__(setup)
        self._next: list[list[tuple[int, int]]] = []  # per event: its cells and their next events
        coming: dict[int, int] = {}
        events = [chosen_cells(layer, ids, setup.shape.experts) for layer, ids in future]
        for time in range(len(events) - 1, -1, -1):
            self._next.append([(cell, coming.get(cell, _NEVER)) for cell in events[time]])
            coming.update(dict.fromkeys(events[time], time))
        self._next.reverse()
        self._time = 0
        # Keys are negated, so that the cell furthest in the future has the lowest key.
        self._keys = [-_NEVER] * setup.cells
        for cell, time in coming.items():
            self._keys[cell] = -time
        self._resident = np.full(setup.cells, _ABSENT, np.int64)

    def routed(
        self, layer: int, ids: NDArray[np.integer[Any]], weights: Weights | None = None
    ) -> None:
        for cell, time in self._next[self._time]:
            self._keys[cell] = -time
            if self._resident[cell] != _ABSENT:
                self._resident[cell] = -time
        self._time += 1

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
