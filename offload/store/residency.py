"""The slot table of one tier: each expert's slot, whether its bytes are there, and its pins.

Does not know why an expert comes or goes (policies) nor how its bytes travel (transfer).

             assign               loaded
    free ───────────▶ loading ──────────────▶ resident
     ▲ ▲               │   │                   ▲   │
     │ └─ release, ────┘   └─ give_up ▶ lost     │   │
     ├──── regain ◀────────────────────┘       │   │
     ├──── evict ◀─────────────────────────────┼───┘
     └──── restore ────────────────────────────┘

A cell that a layer requests is pinned from `assign` or `pin` on; one that is prefetched is not.
Nothing pinned is evicted, so an expert in use is never overwritten. Bytes stay in a slot until a
read into it begins: the victim of a read that never began is restored. The slot of a read that
hangs is lost until that read has ended.

No other object of a tier notes a place. A policy receives every arrival and departure, and keeps
the data it needs to choose a victim. One integer per cell is the whole state:

    slot >= 0    resident in that slot
    -1           absent
    -2 - slot    loading into that slot

Only the engine's thread uses it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ABSENT = -1


class Residency:
    """The slot table of one tier. Cells are layer · E + expert."""

    def __init__(self, slots: int, cells: int, most: int | None = None) -> None:
        """Set up an empty table. most: the slots that may be in use later; None: slots."""
        assert slots > 0, "a cache needs a place"
        self.cells = cells
        self._place = array("i", [_ABSENT]) * cells  # one item costs the same as in a list
        self._places = np.frombuffer(self._place, np.intc)  # the same memory, for many cells
        self._pins: dict[int, int] = {}  # cell -> pins > 0
        self._empty = list(range(slots - 1, -1, -1))
        self._withheld = list(range((most or slots) - 1, slots - 1, -1))
        self._lost: list[int] = []  # slots
        self.loading = 0  # cells whose bytes are in flight
        self.leaving = cells  # only cells below this number may leave
        self.slots = slots  # in use

    @property
    def all_fit(self) -> bool:
        """True if no cell has to leave, unless hung reads hold slots."""
        return self.slots >= self.cells

    @property
    def most(self) -> int:
        """The most slots that can be in use."""
        return self.slots + len(self._withheld)

    @property
    def free(self) -> int:
        """Slots that assign can give."""
        return len(self._empty)

    @property
    def count(self) -> int:
        """Cells whose bytes are there."""
        return self.slots - len(self._empty) - len(self._lost) - self.loading

    @property
    def address(self) -> int:
        """The address of the state in memory: one int32 per cell, which native code reads."""
        return self._place.buffer_info()[0]

    def is_resident(self, cell: int) -> bool:
        return self._place[cell] >= 0

    def are_resident(self, cells: Iterable[int]) -> bool:
        """Return whether the bytes of all of them are there."""
        return min(map(self._place.__getitem__, cells), default=0) >= 0

    def resident(self, cells: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """Return, for cells of any shape, which have their bytes there."""
        here: NDArray[np.bool_] = self._places[cells] >= 0
        return here

    def has_slot(self, cell: int) -> bool:
        """Return whether the cell is resident or loading."""
        return self._place[cell] != _ABSENT

    def slot_of(self, cell: int) -> int:
        """Return the slot of a cell that has one."""
        place = self._place[cell]
        assert place != _ABSENT, f"cell {cell} has no slot"
        return place if place >= 0 else -2 - place

    def assign(self, cell: int, *, pinned: bool = True) -> int:
        """Give a free slot to a cell whose bytes are about to be read."""
        assert self._place[cell] == _ABSENT, f"cell {cell} has a slot already"
        slot = self._empty.pop()
        self._place[cell] = -2 - slot
        self.loading += 1
        if pinned:
            self._pins[cell] = 1
        return slot

    def loaded(self, cell: int) -> None:
        """Mark a cell as resident: its bytes have arrived. Pins stay."""
        place = self._place[cell]
        assert place < _ABSENT, f"cell {cell} is not loading"
        self._place[cell] = -2 - place
        self.loading -= 1

    def pin(self, cell: int) -> None:
        """Pin a cell that has a slot: it is in use, or will be when it has arrived."""
        self._pins[cell] = self._pins.get(cell, 0) + 1

    def unpin(self, cell: int) -> None:
        left = self._pins.pop(cell) - 1
        if left:
            self._pins[cell] = left

    def can_evict(self, cell: int) -> bool:
        return cell < self.leaving and self._is_idle(cell)

    def idle(self, busy: Collection[int]) -> Callable[[int], bool]:
        """Return can_evict, restricted to cells that are not in `busy`."""
        if not busy:
            return self.can_evict
        return lambda cell: cell not in busy and self.can_evict(cell)

    def evict(self, cell: int) -> None:
        """Evict an unpinned resident cell; its slot is the next to be given."""
        assert self._is_idle(cell), f"cell {cell} is in use"
        self._empty.append(self._place[cell])
        self._place[cell] = _ABSENT

    def restore(self, cell: int, slot: int) -> None:
        """Put an evicted cell back in its old slot, which is free and was not written to."""
        assert self._place[cell] == _ABSENT, f"cell {cell} has a slot already"
        self._empty.remove(slot)
        self._place[cell] = slot

    def release(self, cell: int) -> int:
        """Free and return the slot of a cell whose read failed or was cancelled."""
        slot = self._leave(cell)
        self._empty.append(slot)
        return slot

    def give_up(self, cell: int, may_write: Callable[[int], bool]) -> None:
        """Free a cell's slot; while its read may still write, it is lost until `regain`."""
        slot = self._leave(cell)
        (self._lost if may_write(slot) else self._empty).append(slot)

    def regain(self, may_write: Callable[[int], bool]) -> None:
        """Free the lost slots that nothing writes to any more."""
        if self._lost:
            kept = [slot for slot in self._lost if may_write(slot)]
            self._empty += [slot for slot in self._lost if slot not in kept]
            self._lost = kept

    def withhold(self) -> int:
        """Take a free slot out of use and return it."""
        slot = self._empty.pop()
        self._withheld.append(slot)
        self.slots -= 1
        return slot

    def grant(self) -> None:
        """Put a withheld slot in use; it is free."""
        self._empty.append(self._withheld.pop())
        self.slots += 1

    def places(self) -> NDArray[np.intc]:
        """Return a copy of the state (see the module). Any thread may call this."""
        return self._places.copy()

    def present(self) -> list[int]:
        """Return the resident cells, in ascending order."""
        return [int(cell) for cell in np.flatnonzero(self._places >= 0)]

    def pinned(self) -> int:
        """Return the number of cells in use; 0 between passes."""
        return len(self._pins)

    def _is_idle(self, cell: int) -> bool:
        return cell not in self._pins and self._place[cell] >= 0

    def _leave(self, cell: int) -> int:
        place = self._place[cell]
        assert place < _ABSENT, f"cell {cell} is not loading"
        self._place[cell] = _ABSENT
        self._pins.pop(cell, None)
        self.loading -= 1
        return -2 - place
