"""Test that memory moves under all that can be in flight: no answer changes, nothing is left.

In each pass another thread asks for a move, which is made before the next pass.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from moeinf.runtime.config import PREFILL_CHUNK
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.drafts.draft_gate import DraftGate
from moeinf.runtime.generation.events import Ended, Event, Request, Vector
from moeinf.runtime.generation.scheduler import Scheduler
from moeinf.runtime.requests import Limits, SamplingOptions
from moeinf.runtime.sampling.grammar import json_of
from moeinf.runtime.sizes import parse_memory
from tests.conftest import Open, endless

WARM = SamplingOptions(temperature=0.8, top_k=20, seed=5)
LONG = [16 + 7 * place % 200 for place in range(PREFILL_CHUNK + 90)]
REPEATING = [16 + 37 * place % 200 for place in range(20)] * 2
SIZES = ["12%", "100%", "30%", "60%", "12%", "45%", "90%"]


class Mover:
    """Asks for another size in each pass of an engine."""

    def __init__(self, engine: Engine) -> None:
        self.passes = 0
        self._engine, self._threads = engine, list[threading.Thread]()
        self._slots = engine.info.slots
        self._begin, self._end = engine.store.begin_pass, engine.store.end_pass
        engine.store.begin_pass = self.begin_pass  # type: ignore[method-assign]
        engine.store.end_pass = self.end_pass  # type: ignore[method-assign]

    def begin_pass(self, *about: Any) -> None:
        engine = self._engine
        self._slots = engine.info.slots
        assert engine.store.resident <= self._slots
        size = parse_memory(SIZES[self.passes % len(SIZES)])
        self.passes += 1
        self._threads.append(threading.Thread(target=lambda: engine.set_memory(size)))
        self._threads[-1].start()
        until = time.monotonic() + 20
        while not engine.memory._asked:
            assert time.monotonic() < until
            time.sleep(0)
        self._begin(*about)

    def end_pass(self, *about: Any) -> None:
        assert self._engine.memory._asked
        assert self._engine.info.slots == self._slots  # nothing moves under a pass
        self._end(*about)

    def end(self) -> None:
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()


def ask(prompt: Sequence[int], **about: Any) -> tuple[Request, list[Event]]:
    events: list[Event] = []
    most = 0 if about.get("embed") else 16
    return Request(lambda _: list(prompt), WARM, Limits(most), events.append, **about), events


def run(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.begin(request)
    while scheduler.requests:
        scheduler.place()
        scheduler.round()


@pytest.mark.parametrize("window", [PREFILL_CHUNK, 2 * PREFILL_CHUNK])
def test_moves_under_everything(
    window: int, open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftGate, "worth", lambda _, __, chances, *___: min(5, len(chances)))
    asked: list[tuple[Sequence[int], dict[str, Any]]] = [
        (LONG, {}),
        (LONG, {"embed": True}),
        ([*LONG[5:], 9], {"constrain": json_of("json")}),
        (REPEATING, {}),
    ]
    still = open_engine(memory="100%", window=window, trace=False)
    endless(still)
    expected = []
    for prompt, about in asked:
        request, events = ask(prompt, **about)
        run(Scheduler(still), request)
        expected.append(events)

    engine = open_engine(memory="30%", window=window, trace=False, parallel=4)
    endless(engine)
    scheduler, mover = Scheduler(engine, 4), Mover(engine)
    found = [ask(prompt, **about) for prompt, about in asked]
    company, cut_in_company = ask(LONG[3:], stopped=lambda: mover.passes >= 3)
    run(scheduler, *(request for request, _ in found[:3]), company)
    run(scheduler, found[3][0])  # alone, with drafts
    read: list[int] = []
    early, cut_early = ask(LONG[7:], stopped=lambda: any(read), reading=lambda n, _: read.append(n))
    late, cut_late = ask(REPEATING[1:], stopped=lambda: len(cut_late) >= 4)
    run(scheduler, early)
    run(scheduler, late)
    mover.end()

    for (_, events), wanted in zip(found, expected, strict=True):
        ends = [each[-1] for each in (events, wanted)]
        assert all(isinstance(end, Ended) for end in ends), ends
        tokens = [end.token_ids for end in ends if isinstance(end, Ended)]
        assert tokens[0] == tokens[1]
        vectors = [[e.values for e in each if isinstance(e, Vector)] for each in (events, wanted)]
        assert np.array_equal(*vectors)
    drafted = found[3][1][-1]
    assert isinstance(drafted, Ended)
    assert drafted.drafted > 0
    for cut in (cut_in_company, cut_early, cut_late):
        assert isinstance(cut[-1], Ended)
        assert cut[-1].reason == "cancelled"
    assert not cut_early[:-1]  # its prompt was being read
    assert engine.memory.moves.grown + engine.memory.moves.shrunk >= mover.passes - 1
    assert engine.store.idle
    assert not engine.memory._asked


def test_a_pass_that_fails_ends_before_a_move(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may change the slots only when the store has let go of the pass."""
    engine = open_engine(memory="30%", trace=False, context=64)
    state = engine.new_state()
    engine.extend(state, [20, 21, 22])
    free = list[bool]()

    def abandon() -> None:
        def look() -> None:
            free.append(engine.memory._lock.acquire(blocking=False))
            if free[-1]:
                engine.memory._lock.release()

        thread = threading.Thread(target=look)
        thread.start()
        thread.join(20)
        let_go()

    def fail(_: torch.Tensor) -> int:
        monkeypatch.setattr(engine.store, "abandon", abandon)
        raise ZeroDivisionError

    let_go = engine.store.abandon
    with pytest.raises(ZeroDivisionError):
        engine.check(state, [23, 24], fail)
    assert len(free) == 2  # at the end of the pass, and for what it may have left
    assert not any(free)
