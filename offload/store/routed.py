"""The routing of one layer, converted once for all its readers.

Does not know residency or arithmetic. Policies and native code read the array in place; the others
read the lists.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.integer[Any]]


@dataclass(slots=True)
class Routed:
    """ids [T, K] of one layer, -1: no expert; the same by cell (layer · E + expert).

    places: per distinct cell its places t·K + k, ascending.
    cells: the same cells in the order that policies see: routed order for one row, ascending for
    several.
    events: the number of ids that are experts.
    weights: the gate's, [T, K], for a policy that wants them.
    """

    layer: int
    ids: Ids
    places: dict[int, list[int]]
    cells: list[int]
    events: int
    weights: NDArray[np.float32] | None = None

    @classmethod
    def of(
        cls, layer: int, ids: Ids, experts: int, weights: NDArray[np.float32] | None = None
    ) -> Routed:
        """Convert ids [T, K]. Raises ValueError for ids outside -1 … experts - 1."""
        first, flat = layer * experts, ids.ravel().tolist()
        events = len(flat) - flat.count(-1)
        places = {first + expert: [place] for place, expert in enumerate(flat) if expert >= 0}
        if len(places) != events:  # an expert has several rows, or an id is below -1
            places = {}
            for place, expert in enumerate(flat):
                if expert != -1:
                    places.setdefault(first + expert, []).append(place)
        cells = list(places) if len(ids) == 1 else sorted(places)
        if cells and (max(cells) >= first + experts or min(flat) < -1):
            numbers = f"{min(flat)} … {max(flat)}"
            raise ValueError(f"expert ids {numbers} with {experts} experts")
        return cls(layer, ids, places, cells, events, weights)

    def events_of(self, cells: Sequence[int]) -> int:
        """Return how many ids are one of these cells, which are distinct."""
        if len(self.places) == self.events:  # one row: each cell has one place
            return len(cells)
        return sum(len(self.places[cell]) for cell in cells)

    def pairs(self) -> list[tuple[int, list[int]]]:
        """Return (cell, places), ascending."""
        return sorted(self.places.items())

    def split(self, here: NDArray[np.bool_]) -> tuple[list[tuple[int, list[int]]], Routed]:
        """Split off the (cell, places) that `here` [T, K] marks, ascending; return both parts."""
        marked = here.ravel().tolist()
        taken = [pair for pair in self.pairs() if marked[pair[1][0]]]
        rest = {cell: at for cell, at in self.places.items() if not marked[at[0]]}
        cells = [cell for cell in self.cells if cell in rest]
        events = self.events - sum(len(at) for _, at in taken)
        ids = np.where(here, self.ids.dtype.type(-1), self.ids)
        return taken, Routed(self.layer, ids, rest, cells, events, self.weights)


def cells_of(layer: int, ids: Ids, experts: int) -> NDArray[np.intp]:
    """Return the cell of every id, of the same shape; for no expert, some cell or -1."""
    return np.add(ids, layer * experts, dtype=np.intp)


def cut(places: list[int], ends: Sequence[int]) -> list[list[int]]:
    """Divide ascending places before each of the ends; empty parts are left out."""
    if not ends:
        return [places]
    at = [0, *(bisect_left(places, end) for end in ends), len(places)]
    return [places[a:b] for a, b in pairwise(at) if a < b]
