"""Least recently used: the baseline that every other policy has to beat.

Does not know layers, requests or what comes next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class Lru:
    """Evicts the cell whose last use lies furthest back."""

    def __init__(self) -> None:
        self._resident: OrderedDict[int, None] = OrderedDict()  # oldest use first

    def used(self, cells: Iterable[int]) -> None:
        for cell in cells:
            if cell in self._resident:
                self._resident.move_to_end(cell)

    def admitted(self, cell: int) -> None:
        self._resident[cell] = None

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        for cell in self._resident:
            if evictable(cell):
                del self._resident[cell]
                return cell
        return None
