"""The slot table: a state machine against a plain model of what must hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moeinf.offload.policy import Lru, Setup
from moeinf.offload.residency import Residency
from moeinf.offload.trace import RoutingShape

SLOTS, CELLS, STAGING = 5, 9, 2


class SlotTable(RuleBasedStateMachine):
    """Loads, pins, uses, admits and evicts at random; the model is a few plain containers.

    `bytes` is what lies in each slot: only a read changes it, and never that of a slot in use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = Residency(SLOTS, CELLS, STAGING)
        self.policy = Lru(Setup(RoutingShape(1, CELLS, 3), SLOTS))
        self.loading: set[int] = set()
        self.staged: set[int] = set()
        self.cached: list[int] = []  # least recently used first
        self.ghosts: list[int] = []  # oldest first
        self.lost: set[int] = set()  # slots
        self.pins: dict[int, int] = {}
        self.bytes: dict[int, int | None] = {}  # slot -> the cell whose bytes are in it

    def absent(self) -> list[int]:
        present = {*self.loading, *self.staged, *self.cached, *self.ghosts}
        return [c for c in range(CELLS) if c not in present]

    @precondition(lambda self: self.table.free and self.absent())
    @rule(data=st.data())
    def begin_load(self, data: st.DataObject) -> None:
        cell = data.draw(st.sampled_from(self.absent()))
        had_empty = self.table.free > len(self.ghosts)
        slot = self.table.assign(cell)
        if not had_empty:
            assert self.bytes[slot] == self.ghosts.pop(0)
        self.bytes[slot] = None
        self.loading.add(cell)
        self.pins[cell] = 1

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), end=st.sampled_from(["loaded", "loaded", "release", "lose"]))
    def end_load(self, data: st.DataObject, end: str) -> None:
        cell = data.draw(st.sampled_from(sorted(self.loading)))
        slot = self.table.slot_of(cell)
        getattr(self.table, end)(cell)
        self.loading.remove(cell)
        if end == "loaded":
            self.bytes[slot] = cell
            self.staged.add(cell)
            return
        del self.pins[cell]
        if end == "lose":
            self.lost.add(slot)

    @precondition(lambda self: self.lost)
    @rule(data=st.data())
    def regain(self, data: st.DataObject) -> None:
        still = data.draw(st.sets(st.sampled_from(sorted(self.lost))))
        self.table.regain(still.__contains__)
        self.lost = still

    @precondition(lambda self: [c for c in range(CELLS) if self.table.is_resident(c)])
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        cell = data.draw(st.sampled_from([*self.staged, *self.cached, *self.ghosts]))
        self.table.pin(cell)
        self.pins[cell] = self.pins.get(cell, 0) + 1
        if cell in self.ghosts:
            self.ghosts.remove(cell)
            self.staged.add(cell)

    @precondition(lambda self: ({*self.staged, *self.cached}) & set(self.pins))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        cell = data.draw(st.sampled_from(sorted(({*self.staged, *self.cached}) & set(self.pins))))
        self.table.unpin(cell)
        self.pins[cell] -= 1
        if not self.pins[cell]:
            del self.pins[cell]

    @precondition(lambda self: self.staged - set(self.pins))
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        """What the store does with a staged expert that is finished with."""
        cell = data.draw(st.sampled_from(sorted(self.staged - set(self.pins))))
        assert self.table.is_staged(cell)
        assert self.table.can_admit() is (len(self.cached) < SLOTS - STAGING)
        self.staged.remove(cell)
        if self.table.can_admit():
            self.table.admit(cell)
        else:
            victim = self.policy.victim(self.table.can_evict)
            assert victim == next((c for c in self.cached if c not in self.pins), None)
            if victim is None:
                self.table.dismiss(cell)
                self.ghosts.append(cell)
                return
            self.table.take_over(cell, victim)
            self.cached.remove(victim)
            self.ghosts.append(victim)
        self.policy.admitted(cell)
        self.cached.append(cell)

    @rule(cells=st.lists(st.integers(0, CELLS - 1), unique=True, max_size=3))
    def use(self, cells: list[int]) -> None:
        self.policy.routed(0, np.array([cells], np.int64))
        for cell in cells:
            if cell in self.cached:
                self.cached.remove(cell)
                self.cached.append(cell)

    @rule()
    def evict(self) -> None:
        victim = self.policy.victim(self.table.can_evict)
        assert victim == next((c for c in self.cached if c not in self.pins), None)
        if victim is not None:
            self.table.evict(victim)
            self.cached.remove(victim)
            self.ghosts.append(victim)

    @invariant()
    def slots_are_held_once(self) -> None:
        present = [*self.staged, *self.cached, *self.ghosts]
        held = [self.table.slot_of(c) for c in [*self.loading, *present]]
        assert len({*held, *self.lost}) == len(held) + len(self.lost)
        free = SLOTS - len(held) - len(self.lost) + len(self.ghosts)
        assert self.table.free == free
        assert all(0 <= slot < SLOTS for slot in held)
        assert len(self.cached) <= self.table.places

    @invariant()
    def resident_bytes_are_there(self) -> None:
        present = [*self.staged, *self.cached, *self.ghosts]
        assert all(self.bytes[self.table.slot_of(c)] == c for c in present)
        assert self.table.pinned() == len(self.pins)
        assert set(self.pins) <= self.loading | self.staged | set(self.cached)
        assert self.table.resident == len(present)
        assert [c for c in range(CELLS) if self.table.is_resident(c)] == sorted(present)
        every = range(CELLS)
        assert [c for c in every if self.table.are_cached({c})] == sorted(self.cached)
        assert self.table.are_cached(set(self.cached))


TestSlotTable = SlotTable.TestCase
TestSlotTable.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


def test_taking_over_is_a_swap_of_words() -> None:
    """The newcomer stays where it was read; the victim keeps its bytes until they are needed."""
    table = Residency(slots=2, cells=4, staging=1)
    assert table.assign(0) == 0
    table.loaded(0)
    table.unpin(0)
    table.admit(0)
    assert table.assign(1) == 1
    table.loaded(1)
    with pytest.raises(AssertionError):
        table.dismiss(1)  # in use
    table.unpin(1)
    table.take_over(1, victim=0)
    assert (table.slot_of(1), table.slot_of(0)) == (1, 0)
    assert table.is_resident(0)  # a ghost
    assert table.can_evict(1)
    assert not table.can_evict(0)
    table.pin(0)  # revived: staged, in use, and so not given away
    assert table.free == 0
    table.unpin(0)
    table.dismiss(0)
    assert table.assign(2) == 0
    assert not table.is_resident(0)
