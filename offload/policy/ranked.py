"""Evict by a key per cell: the resident cell with the lowest one leaves.

A subclass writes `keys`, whenever it learns something, and decides nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from moeinf.offload.policy.base import Evictable, Passive, Setup, lowest


class Ranked(Passive):
    """Evict the resident cell with the lowest of `keys` [L·E]; among equals the lowest number."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.keys = np.zeros(setup.cells)
        self._absent = np.full(setup.cells, np.inf)  # 0 for resident cells

    def admitted(self, cell: int) -> None:
        self.insertions += 1
        self._absent[cell] = 0

    def victim(self, evictable: Evictable) -> int | None:
        cell = lowest(self.keys + self._absent, evictable)
        if cell is not None:
            self._absent[cell] = np.inf
        return cell

    def forget(self, cells: Iterable[int]) -> None:
        self._absent[list(cells)] = np.inf

    def is_absent(self, cell: int) -> bool:
        return bool(self._absent[cell])
