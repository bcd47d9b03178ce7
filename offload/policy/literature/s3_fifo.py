"""S3-FIFO: a small queue filters the cells that are used once; the main queue gives second chances.

Source: Yang et al., SOSP 2023. A tenth of the slots is the small queue. A cell that was used at
least twice in it moves to the main queue; another leaves, and a ghost remembers it. A ghost that
returns enters the main queue. There the oldest cell leaves, or goes to the end and loses one use.
Differences: a cell in use is skipped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.policy.base import Evictable, Passive, Setup, Weights, chosen_cells

SMALL = 0.1  # share of the slots
OFTEN = 2  # uses in the small queue that lead to the main one
MOST_USES = 3


class S3Fifo(Passive):
    """Evict the oldest cell that was not used again while it was queued."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._small, self._main, self._ghosts = (OrderedDict[int, None]() for _ in range(3))
        self._uses: dict[int, int] = {}  # of resident cells, since they arrived

    def routed(
        self, layer: int, ids: NDArray[np.integer[Any]], weights: Weights | None = None
    ) -> None:
        for cell in chosen_cells(layer, ids, self.setup.shape.experts):
            if cell in self._uses:
                self._uses[cell] = min(MOST_USES, self._uses[cell] + 1)

    def admitted(self, cell: int) -> None:
        self.insertions += 1
        self._uses[cell] = 0
        known = cell in self._ghosts
        self._ghosts.pop(cell, None)
        (self._main if known else self._small)[cell] = None

    def victim(self, evictable: Evictable) -> int | None:
        queues = [self._from_small, self._from_main]
        if len(self._small) < max(1, round(SMALL * self.setup.slots)):
            queues.reverse()
        for queue in queues:
            cell = queue(evictable)
            if cell is not None:
                del self._uses[cell]
                return cell
        return None

    def forget(self, cells: Iterable[int]) -> None:
        for cell in cells:
            self._uses.pop(cell, None)
            self._small.pop(cell, None)
            self._main.pop(cell, None)

    def _from_small(self, evictable: Evictable) -> int | None:
        for cell in list(self._small):
            if self._uses[cell] >= OFTEN:
                del self._small[cell]
                self._main[cell] = None
                self._uses[cell] = 0
            elif evictable(cell):
                del self._small[cell]
                self._ghosts[cell] = None
                if len(self._ghosts) > self.setup.slots:
                    self._ghosts.popitem(last=False)
                return cell
        return None

    def _from_main(self, evictable: Evictable) -> int | None:
        for _ in range(MOST_USES + 1):  # then no cell has uses left
            for cell in list(self._main):
                if self._uses[cell]:
                    self._uses[cell] -= 1
                    self._main.move_to_end(cell)
                elif evictable(cell):
                    del self._main[cell]
                    return cell
        return None
