"""Who is where: which expert holds which slot, which bytes are there, which are in use.

Does not know why an expert comes or goes (policies) nor how its bytes travel (transfer).

             assign               loaded
    free ───────────▶ loading ──────────────▶ resident
     ▲ ▲               │   │                   ▲   │
     │ └─ release, ────┘   └─ give_up ▶ lost     │   │
     ├──── regain ◀────────────────────┘       │   │
     ├──── evict ◀─────────────────────────────┼───┘
     └──── restore ────────────────────────────┘

What a layer asks for is pinned from `assign` or `pin` on; what is read ahead is not. Nothing pinned
is evicted, so an expert in use is never overwritten. Bytes stay in a slot until a read into it
begins: the victim of a read that never began is restored. The slot of a read that hangs is lost
until that read has ended.

Used by the engine's thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable


class Residency:
    """The slot table of one tier. Cells are layer · E + expert."""

    def __init__(self, slots: int, cells: int) -> None:
        assert slots > 0, "a cache needs a place"
        self.cells = cells
        self._slot_of: list[int] = [-1] * cells
        self._was_in: list[int] = [-1] * cells  # the slot that an evicted cell had
        self._cell_in: list[int] = [-1] * slots  # who had the slot last
        self._pins: dict[int, int] = {}  # cell -> pins > 0
        self._loading: set[int] = set()
        self._empty = list(range(slots - 1, -1, -1))
        self._lost: list[int] = []  # slots
        self.slots = slots
        self.all_fit = slots >= cells  # nobody has to leave, unless hung reads hold slots

    @property
    def free(self) -> int:
        """Slots that assign can give."""
        return len(self._empty)

    @property
    def resident(self) -> int:
        """Cells whose bytes are there."""
        return self.slots - len(self._empty) - len(self._lost) - len(self._loading)

    def is_resident(self, cell: int) -> bool:
        return self._slot_of[cell] >= 0 and cell not in self._loading

    def are_resident(self, cells: Iterable[int]) -> bool:
        """Whether the bytes of all of them are there."""
        if self._loading:
            return all(map(self.is_resident, cells))
        return min(map(self._slot_of.__getitem__, cells), default=0) >= 0

    def has_slot(self, cell: int) -> bool:
        """Resident or loading."""
        return self._slot_of[cell] >= 0

    def slot_of(self, cell: int) -> int:
        """The slot of a cell that has one."""
        slot = self._slot_of[cell]
        assert slot >= 0, f"cell {cell} has no slot"
        return slot

    def cell_in(self, slot: int) -> int:
        """Whose slot it is."""
        cell = self._cell_in[slot]
        assert self._slot_of[cell] == slot, f"nobody has slot {slot}"
        return cell

    def assign(self, cell: int, *, pinned: bool = True) -> int:
        """Gives a free slot to a cell whose bytes are about to be read."""
        assert self._slot_of[cell] < 0, f"cell {cell} has a slot already"
        slot = self._slot_of[cell] = self._empty.pop()
        self._cell_in[slot] = cell
        self._loading.add(cell)
        if pinned:
            self._pins[cell] = 1
        return slot

    def loaded(self, cell: int) -> None:
        """The bytes have arrived; pins stay."""
        self._loading.remove(cell)

    def pin(self, cell: int) -> None:
        """A cell that has a slot is in use, or will be when it has arrived."""
        self._pins[cell] = self._pins.get(cell, 0) + 1

    def unpin(self, cell: int) -> None:
        left = self._pins[cell] - 1
        if left:
            self._pins[cell] = left
        else:
            del self._pins[cell]

    def can_evict(self, cell: int) -> bool:
        return cell not in self._pins and self.is_resident(cell)

    def idle(self, busy: Collection[int]) -> Callable[[int], bool]:
        """can_evict, but for those who are busy."""
        if not busy:
            return self.can_evict
        return lambda cell: cell not in busy and self.can_evict(cell)

    def evict(self, cell: int) -> None:
        """An unpinned resident cell leaves; its slot is the next to be given."""
        assert self.can_evict(cell), f"cell {cell} is in use"
        slot, self._slot_of[cell] = self._slot_of[cell], -1
        self._was_in[cell] = slot
        self._empty.append(slot)

    def restore(self, cell: int) -> None:
        """An evicted cell is back in the slot it had, which is free and was not written to."""
        slot = self._was_in[cell]
        self._empty.remove(slot)
        self._slot_of[cell] = slot
        self._cell_in[slot] = cell

    def release(self, cell: int) -> None:
        """Frees the slot of a cell whose read failed or was cancelled."""
        self._empty.append(self._leave(cell))

    def give_up(self, cell: int, may_write: Callable[[int], bool]) -> None:
        """The same; but while the read may still write, the slot is nobody's until `regain`."""
        slot = self._leave(cell)
        (self._lost if may_write(slot) else self._empty).append(slot)

    def regain(self, may_write: Callable[[int], bool]) -> None:
        """Frees the lost slots that nothing writes to any more."""
        if self._lost:
            kept = [slot for slot in self._lost if may_write(slot)]
            self._empty += [slot for slot in self._lost if slot not in kept]
            self._lost = kept

    def pinned(self) -> int:
        """Cells in use; 0 between passes."""
        return len(self._pins)

    def _leave(self, cell: int) -> int:
        self._loading.remove(cell)
        self._pins.pop(cell, None)
        slot, self._slot_of[cell] = self._slot_of[cell], -1
        return slot
