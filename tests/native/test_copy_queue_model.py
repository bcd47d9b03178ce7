"""Hypothesis runs the queue beside a small reference model of ticket states.

The only reader is paused except while it empties the queue, so the model can predict the order in
which the tickets end.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moeinf.native import (
    DEMAND,
    PAGE_BYTES,
    RESIDENT,
    Cancelled,
    CopyQueue,
    CorruptShard,
    SlotPool,
    crc32c,
)

SLOTS = 5
PAYLOADS = [bytes([i]) * (i * 1500 + 1) for i in range(4)]
ENDS = [type(None), type(None), CorruptShard, FileNotFoundError]  # of source 0, 1, 2, 3

priorities = st.sampled_from([0.0, 0.25, 1.0, DEMAND]) | st.floats(allow_nan=False)
slots = st.integers(0, SLOTS - 1)
sources = st.integers(0, len(PAYLOADS) - 1)


@dataclass
class Expected:
    source: int
    slot: int
    priority: float
    end: type | None = None  # None: still queued


class QueueAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="moeinf-test-")
        self.pool = SlotPool(SLOTS, 2 * PAGE_BYTES)
        self.queue = CopyQueue(self.pool, readers=1, max_open_files=2)
        self.queue.pause()
        for i, payload in enumerate(PAYLOADS):
            path = Path(self.folder.name, str(i))
            if ENDS[i] is not FileNotFoundError:
                path.write_bytes(bytes(PAGE_BYTES) + payload)
            crc = crc32c(payload) ^ (ENDS[i] is CorruptShard)
            assert self.queue.add_source(path, PAGE_BYTES, len(payload), crc) == i
        self.model: dict[int, Expected] = {}  # ticket -> its undelivered outcome
        self.ended: list[int] = []  # the ended ones, in the order of ending
        self.issued = 0
        self.holds: dict[int, int] = {}  # slot -> the source whose bytes it contains
        self.found = 0

    def teardown(self) -> None:
        self.queue.close()
        self.folder.cleanup()

    def queued(self) -> list[int]:
        waiting = [t for t, e in self.model.items() if e.end is None]
        return sorted(waiting, key=lambda t: (-self.model[t].priority, t))

    def busy(self) -> set[int]:
        return {self.model[t].slot for t in self.queued()}

    def finish(self, ticket: int, end: type) -> None:
        self.model[ticket].end = end
        self.ended.append(ticket)

    @rule(wanted=st.lists(st.tuples(sources, slots), max_size=4), priority=priorities)
    def submit(self, wanted: list[tuple[int, int]], priority: float) -> None:
        chosen = [slot for _, slot in wanted]
        if len(set(chosen)) < len(chosen) or self.busy() & set(chosen):
            with pytest.raises(RuntimeError):
                self.queue.submit_many([s for s, _ in wanted], chosen, priority)
            return
        tickets = self.queue.submit_many([s for s, _ in wanted], chosen, priority)
        for ticket, (source, slot) in zip(tickets, wanted, strict=True):
            if self.holds.get(slot) == source:
                assert ticket == RESIDENT
                self.queue.wait(ticket)
                self.found += 1
            else:
                self.issued += 1
                assert ticket == self.issued
                self.model[ticket] = Expected(source, slot, priority)

    @rule(slot=slots)
    def invalidate(self, slot: int) -> None:
        self.queue.invalidate(slot)
        self.holds.pop(slot, None)

    @invariant()
    def slots_are_busy_while_queued(self) -> None:
        busy = {slot for slot in range(SLOTS) if not self.queue.can_submit(slot)}
        assert busy == self.busy()

    @precondition(lambda self: self.issued)
    @rule(data=st.data(), priority=priorities)
    def raise_priority(self, data: st.DataObject, priority: float) -> None:
        ticket = data.draw(st.integers(1, self.issued))
        self.queue.raise_priority(ticket, priority)
        if ticket in self.queued():
            expected = self.model[ticket]
            expected.priority = max(expected.priority, priority)

    @precondition(lambda self: self.issued)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        ticket = data.draw(st.integers(1, self.issued))
        was_queued = ticket in self.queued()
        assert self.queue.cancel(ticket) is was_queued
        if was_queued:
            self.finish(ticket, Cancelled)

    @rule()
    def work_off(self) -> None:
        order = self.queued()
        self.queue.resume()
        self.queue.drain()
        self.queue.pause()
        view = memoryview(self.pool).cast("B")
        for ticket in order:
            expected = self.model[ticket]
            self.finish(ticket, ENDS[expected.source])
            self.holds.pop(expected.slot, None)
            if expected.end is type(None):
                self.holds[expected.slot] = expected.source
                payload = PAYLOADS[expected.source]
                assert view[expected.slot * self.pool.slot_bytes :][: len(payload)] == payload

    @rule()
    def collect(self) -> None:
        collected = [(ticket, type(error)) for ticket, error in self.queue.collect()]
        assert collected == [(ticket, self.model[ticket].end) for ticket in self.ended]
        for ticket in self.ended:
            del self.model[ticket]
        self.ended.clear()

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def wait(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.ended))
        end = self.model.pop(ticket).end
        self.ended.remove(ticket)
        if end is type(None):
            self.queue.wait(ticket)
        else:
            assert end is not None
            with pytest.raises(end):
                self.queue.wait(ticket)

    @precondition(lambda self: self.issued)
    @rule(data=st.data())
    def wait_for_the_delivered(self, data: st.DataObject) -> None:
        ticket = data.draw(st.integers(1, self.issued))
        if ticket not in self.model:
            with pytest.raises(ValueError, match="already"):
                self.queue.wait(ticket)

    @invariant()
    def counters_agree(self) -> None:
        counters = self.queue.counters()
        assert counters.submitted == self.issued
        assert counters.resident == self.found
        assert counters.queued == len(self.queued())
        assert counters.undelivered == len(self.ended)
        ended = counters.done + counters.errors + counters.cancelled
        assert counters.submitted == counters.queued + ended
        assert (counters.running, counters.waiting) == (0, 0)


TestQueueAgainstModel = QueueAgainstModel.TestCase
TestQueueAgainstModel.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
