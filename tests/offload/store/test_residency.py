"""The slot table: a state machine against a plain model of what must hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moeinf.offload.store.residency import Residency

SLOTS, CELLS = 5, 9


class SlotTable(RuleBasedStateMachine):
    """Loads, pins, uses and evicts at random; the model is a few plain containers.

    `bytes` is what lies in each slot: only a read changes it, and never that of a slot in use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = Residency(SLOTS, CELLS)
        self.loading: set[int] = set()
        self.resident: set[int] = set()
        self.lost: set[int] = set()  # slots
        self.pins: dict[int, int] = {}
        self.bytes: dict[int, int | None] = {}  # slot -> the cell whose bytes are in it

    @property
    def absent(self) -> list[int]:
        return [c for c in range(CELLS) if c not in self.loading | self.resident]

    @precondition(lambda self: self.table.free and self.absent)
    @rule(data=st.data(), pinned=st.booleans())
    def begin_load(self, data: st.DataObject, pinned: bool) -> None:
        cell = data.draw(st.sampled_from(self.absent))
        self.bytes[self.table.assign(cell, pinned=pinned)] = None
        self.loading.add(cell)
        if pinned:
            self.pins[cell] = 1

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), end=st.sampled_from(["loaded", "loaded", "release", "hang"]))
    def end_load(self, data: st.DataObject, end: str) -> None:
        cell = data.draw(st.sampled_from(sorted(self.loading)))
        slot = self.table.slot_of(cell)
        self.loading.remove(cell)
        if end == "loaded":
            self.table.loaded(cell)
            self.bytes[slot] = cell
            self.resident.add(cell)
            return
        self.pins.pop(cell, None)
        if end == "hang":
            self.table.give_up(cell, {slot}.__contains__)
            self.lost.add(slot)
        else:
            self.table.release(cell)

    @precondition(lambda self: self.lost)
    @rule(data=st.data())
    def regain(self, data: st.DataObject) -> None:
        still = data.draw(st.sets(st.sampled_from(sorted(self.lost))))
        self.table.regain(still.__contains__)
        self.lost = still

    @precondition(lambda self: self.resident | self.loading)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        cell = data.draw(st.sampled_from(sorted(self.resident | self.loading)))
        self.table.pin(cell)
        self.pins[cell] = self.pins.get(cell, 0) + 1

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        cell = data.draw(st.sampled_from(sorted(self.pins)))
        self.table.unpin(cell)
        self.pins[cell] -= 1
        if not self.pins[cell]:
            del self.pins[cell]

    @precondition(lambda self: self.resident - set(self.pins))
    @rule(data=st.data(), wished=st.booleans())
    def evict(self, data: st.DataObject, wished: bool) -> None:
        """Evict a cell: permanently, or for a read that is cancelled before it begins."""
        victim = data.draw(st.sampled_from(sorted(self.resident - set(self.pins))))
        slot = self.table.slot_of(victim)
        self.table.evict(victim)
        newcomers = [cell for cell in self.absent if cell != victim]
        if wished and newcomers:
            assert self.table.assign(newcomers[0], pinned=False) == slot
            assert self.table.release(newcomers[0]) == slot
            self.table.restore(victim, slot)
            assert self.table.slot_of(victim) == slot
        else:
            self.resident.remove(victim)

    @invariant()
    def slots_are_held_once(self) -> None:
        held = [self.table.slot_of(c) for c in self.loading | self.resident]
        assert len({*held, *self.lost}) == len(held) + len(self.lost)
        assert self.table.free == SLOTS - len(held) - len(self.lost)
        assert all(0 <= slot < SLOTS for slot in held)

    @invariant()
    def resident_bytes_are_there(self) -> None:
        assert all(self.bytes[self.table.slot_of(c)] == c for c in self.resident)
        assert self.table.pinned() == len(self.pins)
        assert self.table.count == len(self.resident)
        assert self.table.loading == len(self.loading)
        here = self.table.resident(np.arange(CELLS)[None])
        assert here.tolist() == [[cell in self.resident for cell in range(CELLS)]]
        for cell in range(CELLS):
            assert self.table.is_resident(cell) is (cell in self.resident)
            assert self.table.has_slot(cell) is (cell in self.resident | self.loading)
            assert self.table.can_evict(cell) is (cell in self.resident - set(self.pins))
        assert self.table.are_resident(self.resident)
        assert not any(self.table.are_resident([cell]) for cell in self.absent)


TestSlotTable = SlotTable.TestCase
TestSlotTable.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


def test_what_is_in_use_does_not_leave() -> None:
    table = Residency(slots=1, cells=2)
    table.assign(0)
    table.loaded(0)
    with pytest.raises(AssertionError):
        table.evict(0)
    table.unpin(0)
    table.evict(0)
    assert table.assign(1) == 0


def test_are_resident_only_once_all_have_arrived() -> None:
    table = Residency(slots=3, cells=3)
    assert table.all_fit
    assert table.are_resident([])
    for cell in (2, 0):
        table.assign(cell, pinned=False)
    table.loaded(2)
    assert table.are_resident([2])
    assert not table.are_resident([0, 2])
    table.loaded(0)
    assert table.are_resident([0, 2])
    assert not table.are_resident([0, 1])
    assert not Residency(slots=2, cells=3).all_fit
