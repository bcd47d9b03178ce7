"""Who is where: which expert holds which slot, and which slots are pinned.

Does not know why an expert comes or goes (policies) nor how its bytes travel (transfer).

A slot is always in exactly one of three states:

    free ──assign──▶ loading (pinned) ──loaded──▶ resident (pins ≥ 0)
      ▲                  │                            │
      └──────── release ─┴──────── evict (pins = 0) ──┘

Used by the engine's thread only.
"""

from __future__ import annotations


class Residency:
    """The slot table of one tier. Cells are layer · E + expert."""

    def __init__(self, slots: int, cells: int) -> None:
        self._slot_of: list[int] = [-1] * cells
        self._pins: dict[int, int] = {}  # cell -> pins > 0
        self._loading: set[int] = set()
        self._free = list(range(slots - 1, -1, -1))
        self.slots = slots

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def resident(self) -> int:
        return self.slots - len(self._free) - len(self._loading)

    def is_resident(self, cell: int) -> bool:
        return self._slot_of[cell] >= 0 and cell not in self._loading

    def slot_of(self, cell: int) -> int:
        """The slot of a cell that has one."""
        slot = self._slot_of[cell]
        assert slot >= 0, f"cell {cell} has no slot"
        return slot

    def assign(self, cell: int) -> int:
        """Gives a free slot to a cell whose bytes are about to be read; it stays pinned."""
        assert self._slot_of[cell] < 0, f"cell {cell} has a slot already"
        slot = self._free.pop()
        self._slot_of[cell] = slot
        self._loading.add(cell)
        self._pins[cell] = 1
        return slot

    def loaded(self, cell: int) -> None:
        """The bytes have arrived; the pin of `assign` is still held."""
        self._loading.remove(cell)

    def pin(self, cell: int) -> None:
        self._pins[cell] = self._pins.get(cell, 0) + 1

    def unpin(self, cell: int) -> None:
        left = self._pins[cell] - 1
        if left:
            self._pins[cell] = left
        else:
            del self._pins[cell]

    def can_evict(self, cell: int) -> bool:
        return cell not in self._pins

    def evict(self, cell: int) -> None:
        """Frees the slot of an unpinned resident cell."""
        assert cell not in self._pins, f"cell {cell} is in use"
        self._free.append(self.slot_of(cell))
        self._slot_of[cell] = -1

    def release(self, cell: int) -> None:
        """Frees the slot of a cell whose read failed or was cancelled."""
        self._loading.remove(cell)
        del self._pins[cell]
        self.evict(cell)

    def pinned(self) -> int:
        """Cells in use; 0 between passes."""
        return len(self._pins)
