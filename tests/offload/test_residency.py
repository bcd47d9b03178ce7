"""The slot table: a state machine against a plain model of what must hold."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moeinf.offload.policy import Lru, Setup
from moeinf.offload.residency import Residency
from moeinf.offload.trace import RoutingShape

SLOTS, CELLS = 4, 9


class SlotTable(RuleBasedStateMachine):
    """Loads, pins, uses and evicts at random; the model is three plain containers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Residency(SLOTS, CELLS)
        self.policy = Lru(Setup(RoutingShape(1, CELLS, 3), SLOTS))
        self.loading: set[int] = set()
        self.uses: list[int] = []  # resident cells, least recently used first
        self.pins: dict[int, int] = {}

    def absent(self) -> list[int]:
        return [c for c in range(CELLS) if c not in self.loading and c not in self.uses]

    @precondition(lambda self: self.table.free and self.absent())
    @rule(data=st.data())
    def begin_load(self, data: st.DataObject) -> None:
        cell = data.draw(st.sampled_from(self.absent()))
        self.table.assign(cell)
        self.loading.add(cell)
        self.pins[cell] = 1

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        cell = data.draw(st.sampled_from(sorted(self.loading)))
        self.table.loaded(cell)
        self.policy.admitted(cell)
        self.loading.remove(cell)
        self.uses.append(cell)

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def fail_load(self, data: st.DataObject) -> None:
        cell = data.draw(st.sampled_from(sorted(self.loading)))
        self.table.release(cell)
        self.loading.remove(cell)
        del self.pins[cell]

    @precondition(lambda self: self.uses)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        cell = data.draw(st.sampled_from(self.uses))
        self.table.pin(cell)
        self.pins[cell] = self.pins.get(cell, 0) + 1

    @precondition(lambda self: set(self.uses) & set(self.pins))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        cell = data.draw(st.sampled_from(sorted(set(self.uses) & set(self.pins))))
        self.table.unpin(cell)
        self.pins[cell] -= 1
        if not self.pins[cell]:
            del self.pins[cell]

    @rule(cells=st.lists(st.integers(0, CELLS - 1), unique=True, max_size=3))
    def use(self, cells: list[int]) -> None:
        self.policy.routed(0, np.array([cells], np.int64))
        for cell in cells:
            if cell in self.uses:
                self.uses.remove(cell)
                self.uses.append(cell)

    @rule()
    def evict(self) -> None:
        victim = self.policy.victim(self.table.can_evict)
        assert victim == next((c for c in self.uses if c not in self.pins), None)
        if victim is not None:
            self.table.evict(victim)
            self.uses.remove(victim)

    @invariant()
    def slots_are_held_once(self) -> None:
        held = [self.table.slot_of(c) for c in [*self.loading, *self.uses]]
        assert len(set(held)) == len(held)
        assert len(held) + self.table.free == SLOTS
        assert all(0 <= slot < SLOTS for slot in held)

    @invariant()
    def pinned_means_present(self) -> None:
        assert self.table.pinned() == len(self.pins)
        assert set(self.pins) <= self.loading | set(self.uses)
        assert self.table.resident == len(self.uses)
        assert [c for c in range(CELLS) if self.table.is_resident(c)] == sorted(self.uses)


TestSlotTable = SlotTable.TestCase
TestSlotTable.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
