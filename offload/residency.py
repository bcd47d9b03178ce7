"""Who is where: which expert holds which slot, which are in the cache, which are in use.

Does not know why an expert comes or goes (policies) nor how its bytes travel (transfer).

    slots = cache places + staging; what a slot is, is a word in this table: no byte ever moves

              assign              loaded              admit, take_over
    free ───────────▶ loading ───────────▶ staged ──────────────────────▶ cached
     │ ▲ ▲            (pinned)│             │   ▲ pin                        │
     │ │ └──────── release ───┤             │   └──────────┐                 │
     │ └─ regain ── lost ◀─ lose            └─ dismiss ──▶ ghost ◀── evict ──┘
     └─ a free slot is empty, or the slot of a ghost ─────────┘

A miss is read into a free slot, is computed from there, and takes over a cache place when a victim
gives up its own: the two slots swap what they are. A victim is overwritten at the latest possible
moment: as a *ghost* it keeps its bytes until its slot is given away, oldest first, and a pin
revives it without a read. Only what nobody has pinned becomes a ghost, and only ghosts' slots are
given away: an expert in use is never overwritten. The slot of a read that hangs is lost until that
read has ended.

Used by the engine's thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Set


class Residency:
    """The slot table of one tier. Cells are layer · E + expert. 0 ≤ staging < slots."""

    def __init__(self, slots: int, cells: int, staging: int = 0) -> None:
        assert 0 <= staging < slots, "a cache needs a place"
        self._slot_of: list[int] = [-1] * cells
        self._pins: dict[int, int] = {}  # cell -> pins > 0
        self._loading: set[int] = set()
        self._staged: set[int] = set()
        self._cached: set[int] = set()
        self._ghosts: dict[int, None] = {}  # oldest first
        self._empty = list(range(slots - 1, -1, -1))
        self._lost: list[int] = []  # slots
        self.slots = slots
        self.places = slots - staging

    @property
    def free(self) -> int:
        """Slots that assign can give."""
        return len(self._empty) + len(self._ghosts)

    @property
    def resident(self) -> int:
        """Cells whose bytes are there, ghosts among them."""
        return len(self._staged) + len(self._cached) + len(self._ghosts)

    def is_resident(self, cell: int) -> bool:
        return self._slot_of[cell] >= 0 and cell not in self._loading

    def are_cached(self, cells: Set[int]) -> bool:
        """Whether all of them are in the cache: neither staged nor ghosts."""
        return cells <= self._cached

    def slot_of(self, cell: int) -> int:
        """The slot of a cell that has one."""
        slot = self._slot_of[cell]
        assert slot >= 0, f"cell {cell} has no slot"
        return slot

    def assign(self, cell: int) -> int:
        """Gives a free slot to a cell whose bytes are about to be read; it stays pinned."""
        assert self._slot_of[cell] < 0, f"cell {cell} has a slot already"
        if self._empty:
            slot = self._empty.pop()
        else:
            ghost = next(iter(self._ghosts))
            del self._ghosts[ghost]
            slot, self._slot_of[ghost] = self._slot_of[ghost], -1
        self._slot_of[cell] = slot
        self._loading.add(cell)
        self._pins[cell] = 1
        return slot

    def loaded(self, cell: int) -> None:
        """The bytes have arrived: staged, with the pin of `assign` still held."""
        self._loading.remove(cell)
        self._staged.add(cell)

    def pin(self, cell: int) -> None:
        """A resident cell is in use; a ghost is staged again."""
        if cell in self._ghosts:
            del self._ghosts[cell]
            self._staged.add(cell)
        self._pins[cell] = self._pins.get(cell, 0) + 1

    def unpin(self, cell: int) -> None:
        left = self._pins[cell] - 1
        if left:
            self._pins[cell] = left
        else:
            del self._pins[cell]

    def is_staged(self, cell: int) -> bool:
        return cell in self._staged

    def can_admit(self) -> bool:
        """Whether a cache place is empty."""
        return len(self._cached) < self.places

    def admit(self, cell: int) -> None:
        """A staged cell takes an empty cache place."""
        assert self.can_admit()
        self._staged.remove(cell)
        self._cached.add(cell)

    def take_over(self, cell: int, victim: int) -> None:
        """A staged cell takes the cache place of an unpinned victim, which becomes a ghost."""
        self.evict(victim)
        self.admit(cell)

    def dismiss(self, cell: int) -> None:
        """A staged cell that nobody uses is not admitted: a ghost."""
        assert cell not in self._pins, f"cell {cell} is in use"
        self._staged.remove(cell)
        self._ghosts[cell] = None

    def can_evict(self, cell: int) -> bool:
        return cell in self._cached and cell not in self._pins

    def evict(self, cell: int) -> None:
        """An unpinned cached cell gives up its place: a ghost."""
        assert cell not in self._pins, f"cell {cell} is in use"
        self._cached.remove(cell)
        self._ghosts[cell] = None

    def release(self, cell: int) -> None:
        """Frees the slot of a cell whose read failed or was cancelled."""
        self._empty.append(self._leave(cell))

    def lose(self, cell: int) -> None:
        """The read was given up and may still write: the slot is nobody's until regain."""
        self._lost.append(self._leave(cell))

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
        del self._pins[cell]
        slot, self._slot_of[cell] = self._slot_of[cell], -1
        return slot
