"""ARC: a list of cells used once and one of cells used again; ghosts move the border between them.

Source: Megiddo and Modha, FAST 2003. The lists T1 (used once) and T2 (used again) hold resident
cells, the ghosts B1 and B2 cells that left them. A miss on a ghost of B1 enlarges the target of T1,
one of B2 shrinks it. Differences: the ghosts adapt the target when a layer has routed, because the
victim is requested before the arrival; a cell in use is skipped; a cell that was prefetched and not
used yet lies in T1.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.policy.base import Evictable, Passive, Setup, Weights, chosen_cells

Cells = OrderedDict[int, None]  # the least recently used first


class Arc(Passive):
    """Evict the least recently used cell of the list that is over its target."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._once, self._again = Cells(), Cells()
        self._once_left, self._again_left = Cells(), Cells()
        self._target = 0.0  # of the length of _once

    def routed(
        self, layer: int, ids: NDArray[np.integer[Any]], weights: Weights | None = None
    ) -> None:
        for cell in chosen_cells(layer, ids, self.setup.shape.experts):
            if cell in self._once:
                del self._once[cell]
                self._again[cell] = None
            elif cell in self._again:
                self._again.move_to_end(cell)
            elif cell in self._once_left:
                step = max(1, len(self._again_left) / len(self._once_left))
                self._target = min(self.setup.slots, self._target + step)
            elif cell in self._again_left:
                step = max(1, len(self._once_left) / len(self._again_left))
                self._target = max(0, self._target - step)

    def resize(self, slots: int) -> None:
        super().resize(slots)
        self._target = min(slots, self._target)

    def admitted(self, cell: int) -> None:
        self.insertions += 1
        known = cell in self._once_left or cell in self._again_left
        self._once_left.pop(cell, None)
        self._again_left.pop(cell, None)
        (self._again if known else self._once)[cell] = None

    def victim(self, evictable: Evictable) -> int | None:
        first, second = (self._once, self._once_left), (self._again, self._again_left)
        if len(self._once) <= self._target:
            first, second = second, first
        for cells, left in (first, second):
            for cell in cells:
                if evictable(cell):
                    del cells[cell]
                    left[cell] = None
                    self._trim()
                    return cell
        return None

    def forget(self, cells: Iterable[int]) -> None:
        for cell in cells:
            self._once.pop(cell, None)
            self._again.pop(cell, None)

    def _trim(self) -> None:
        """Keep at most as many cells used once as slots, and twice as many of all kinds."""
        slots = self.setup.slots
        while self._once_left and len(self._once) + len(self._once_left) > slots:
            self._once_left.popitem(last=False)
        resident = len(self._once) + len(self._again)
        while self._again_left and (
            resident + len(self._once_left) + len(self._again_left) > 2 * slots
        ):
            self._again_left.popitem(last=False)
