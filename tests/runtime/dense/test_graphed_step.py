"""Decode steps replayed as CUDA graphs: the same tokens, and when graphs are not used.

No GPU is needed: tests/written_down.py replays the torch operations, tensor by tensor.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moeinf.models.base import State
from moeinf.models.layers.kv_cache import KvCache
from moeinf.runtime.config import Settings
from moeinf.runtime.dense import graphed_step
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.chat import Conversation
from moeinf.runtime.generation.report import verbose_lines
from moeinf.runtime.library.library import Library
from moeinf.runtime.requests import Limits, SamplingOptions
from tests.native.fake_cuda import Fake
from tests.runtime.dense.test_dense_on_gpu import config_of
from tests.strict_fake import StrictFake

PROMPTS = (b"17+25=", b"reverse: stone =", b"the largest of 3, 9, 4 is")

Open = Callable[..., Engine]


@pytest.fixture
def open_engine(
    fake: Fake, devices: list[StrictFake], demo_home: Path, request: pytest.FixtureRequest
) -> Iterator[Open]:
    """Return a function that opens the demo with its dense weights on a device.

    Example: open_engine(slots=…, miss=…).
    """
    settings = Settings(demo_home)
    manifest, folder = Library(settings).read("demo")
    request.getfixturevalue("strict")
    engines: list[Engine] = []

    def open_one(*, graphed: bool = True, **given: Any) -> Engine:
        if "slots" in given:
            given = {"memory": "30%", "context": 64, **given}
        engine = Engine.open(manifest, folder, config_of(fake, manifest, **given), settings)
        engines.append(engine)
        if not graphed:
            devices[-1].writing.failing = RuntimeError("a test's: nothing is written down")
        return engine

    yield open_one
    for engine in engines:
        engine.close()


def decoded(engine: Engine, state: State, prompt: bytes, count: int) -> list[int]:
    """Return greedy tokens; the last one is not appended to the state."""
    logits, found = engine.extend(state, list(prompt)), list[int]()
    for _ in range(count):
        found.append(int(logits.argmax()))
        logits = engine.extend(state, found[-1:])
    return found


def texts(engine: Engine, count: int = 12) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        state = engine.new_state()
        request = engine.begin_request(state)
        found.append(decoded(engine, state, prompt, count))
        engine.end_request(request, counts=True)
    assert engine.store.idle
    return found


@pytest.mark.first
@pytest.mark.parametrize(
    "given",
    [
        {"slots": 9, "miss": "fetch"},
        {"slots": 60, "miss": "compute"},
        {"slots": 30, "miss": "auto"},
        {"miss": "fetch"},
    ],
    ids=str,
)
def test_the_tokens_are_those_without(
    given: dict[str, Any], open_engine: Open, devices: list[StrictFake]
) -> None:
    without = open_engine(graphed=False, **given)
    expected, stats = texts(without), without.store.stats
    assert devices[-1].writing.played == 0
    engine = open_engine(**given)
    assert texts(engine) == expected
    writing, layers = devices[-1].writing, engine.info.manifest.layers
    assert writing.written >= 3 * (layers + 1)
    assert writing.played >= 3 * 10 * (layers + 1)
    # each token is routed exactly once
    assert engine.store.stats.decode_events == stats.decode_events
    assert engine.take_notes() == []  # the figure is not a note: --verbose prints it
    assert engine.gpu is not None
    assert engine.gpu.dense_math is not None
    said = engine.gpu.dense_math.graphs
    assert said == "the dense part of a token takes 1.00 ms with them, 3.00 ms without"
    generation = Conversation(engine).ask("1+1=", SamplingOptions(), Limits(max_tokens=2))
    list(generation)
    assert ("CUDA graphs", said) in verbose_lines(engine, generation, 0.0)
    assert without.take_notes() == ["no CUDA graphs: a test's: nothing is written down"]


@pytest.mark.full
def test_texts_in_turn_keep_apart_and_go_back(open_engine: Open, devices: list[StrictFake]) -> None:
    """Ten conversations, more than there are tapes; each is once truncated into its prompt."""

    def play(engine: Engine) -> list[list[int]]:
        states = [engine.new_state() for _ in range(10)]
        found: list[list[int]] = []
        for number, state in enumerate(states):
            engine.begin_request(state)
            prompt = PROMPTS[number % len(PROMPTS)]
            found.append([int(engine.extend(state, list(prompt)).argmax())])
        for step in range(7):
            for number, (state, tokens) in enumerate(zip(states, found, strict=True)):
                if step == 4 + number % 2:
                    state.truncate(5)
                tokens.append(int(engine.extend(state, tokens[-1:]).argmax()))
        return found

    given = {"slots": 30, "miss": "fetch"}
    expected = play(open_engine(graphed=False, **given))
    assert play(open_engine(**given)) == expected
    assert devices[-1].writing.played > 0


def test_requests_that_travel_together_go_without(
    open_engine: Open, devices: list[StrictFake]
) -> None:
    engine = open_engine()
    states = [engine.new_state() for _ in range(2)]
    for state in states:
        engine.begin_request(state)
        engine.extend(state, list(PROMPTS[0]))
    for _ in range(6):
        engine.step([(state, 7) for state in states])
    assert devices[-1].writing.written == 0


@pytest.mark.full
def test_once_all_are_there_results_are_graphs_until_slots_are_given_up(
    open_engine: Open, devices: list[StrictFake]
) -> None:
    engine = open_engine(context=64)
    device, store, layers = devices[-1], engine.store, engine.info.manifest.layers
    expected = texts(engine, 14)
    assert store.device_resident == engine.info.experts
    state = engine.new_state()
    decoded(engine, state, PROMPTS[0], 6)
    before = device.writing.played
    decoded(engine, state, b"+", 2)
    assert device.writing.played - before == 3 * (2 * layers + 1)
    assert store.device is not None
    assert store.device.shrink()
    assert store.device.slots < engine.info.experts
    before = device.writing.played
    decoded(engine, state, b"+", 2)
    assert device.writing.played - before == 3 * (layers + 1)
    assert texts(engine, 14) == expected


def test_what_is_slower_is_not_used(
    open_engine: Open, devices: list[StrictFake], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = accumulate(cycle([1.0, 0.001, 1.0, 0.0015]))
    monkeypatch.setattr(graphed_step, "perf_counter", lambda: next(ticks))
    engine = open_engine(slots=30, miss="fetch")
    expected = texts(open_engine(graphed=False, slots=30, miss="fetch"))
    assert texts(engine) == expected
    assert engine.take_notes() == [
        "no CUDA graphs: the dense part of a token takes 1.50 ms with them, 1.00 ms without"
    ]
    played = devices[0].writing.played
    assert played == graphed_step._ROUNDS * (engine.info.manifest.layers + 1)


def test_what_does_not_repeat_itself_is_not_used(
    open_engine: Open, devices: list[StrictFake], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host changes a number from call to call, for example a text's length."""
    calls = 0

    def attend(device: StrictFake, q: Tensor, *given: Any) -> Tensor:
        nonlocal calls
        calls += 1
        out: Tensor = given[-1]
        return out.copy_(q * calls)

    monkeypatch.setattr(StrictFake, "attend_newest", attend)
    engine = open_engine()
    texts(engine, 4)
    assert engine.take_notes() == [
        "no CUDA graphs: their results differ from those without them; please report this"
    ]


@pytest.mark.full
def test_whom_others_keep_from_it_writes_down_later(
    open_engine: Open, devices: list[StrictFake]
) -> None:
    """Another model uses the same device; a temporary obstacle does not disable capture."""
    expected = texts(open_engine(graphed=False))
    engine = open_engine()
    written = devices[-1].writing
    written.can_begin = False
    assert texts(engine) == expected
    assert written.written == 0
    written.can_begin = True
    assert texts(engine) == expected
    assert written.played > 0


@pytest.mark.first
@pytest.mark.parametrize("after", [0, 20])
def test_a_device_that_cannot_write_down_goes_on_without(
    after: int, open_engine: Open, devices: list[StrictFake]
) -> None:
    """Capture fails at the beginning, or once all experts are resident."""
    expected = texts(open_engine(graphed=False), 30)
    engine = open_engine()
    device = devices[-1]
    end, ended = device.writing.end, 0

    def fails_later() -> Callable[[], None]:
        nonlocal ended
        ended += 1
        if ended > after:
            device.writing.failing = torch.AcceleratorError("CUDA error: operation not permitted\n")
        return end()

    device.writing.end = fails_later  # type: ignore[method-assign]
    assert texts(engine, 30) == expected
    assert engine.take_notes() == ["no CUDA graphs: CUDA error: operation not permitted"]
    assert engine.gpu is not None
    assert engine.gpu.dense_math is not None
    assert engine.gpu.dense_math.graphs is None
    assert device.writing.current is None
    assert device.writing.forgotten == 1  # with its pools


@pytest.mark.full
def test_hints_come_and_go(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text has two tapes: with the next layer's router and without it."""
    expected = texts(open_engine(graphed=False, slots=30, miss="fetch"))
    engine, hinted = open_engine(slots=30, miss="fetch"), 0
    store, wanted = type(engine.store), cycle([True] * 3 + [False] * 4)
    opened = next(wanted)
    begin, hint = store.begin_pass, store.hint

    def begin_pass(self: Any, *given: Any) -> None:
        nonlocal opened
        opened = next(wanted)
        begin(self, *given)

    def count(self: Any, *given: Any) -> None:
        nonlocal hinted
        hinted += 1
        hint(self, *given)

    monkeypatch.setattr(store, "begin_pass", begin_pass)
    monkeypatch.setattr(store, "hint", count)
    monkeypatch.setattr(store, "wants_hints", property(lambda _: opened))
    assert texts(engine) == expected
    assert hinted > 0


def test_nothing_is_left_for_a_garbage_collection(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tape is freed without the garbage collector.

    A text's tapes go with its last reference or when another text needs room. The others go on
    close.
    """
    tapes: list[weakref.ref[graphed_step._Tape]] = []
    made = graphed_step._Tape.__init__

    def noted(self: graphed_step._Tape, *given: Any) -> None:
        tapes.append(weakref.ref(self))
        made(self, *given)

    monkeypatch.setattr(graphed_step._Tape, "__init__", noted)
    engine = open_engine()
    gc.disable()
    try:
        state = engine.new_state()
        assert isinstance(state, KvCache)
        decoded(engine, state, PROMPTS[0], 5)
        text = weakref.ref(state)
        del state
        assert text() is None
        other = engine.new_state()
        decoded(engine, other, PROMPTS[1], 5)
        assert [tape() is not None for tape in tapes] == [False, True]
        engine.close()
        assert tapes[1]() is None
    finally:
        gc.enable()


@pytest.mark.full
def test_texts_in_turn_do_not_push_one_another_out(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six texts share four places; a text that is idle for long loses its place."""
    monkeypatch.setattr(graphed_step, "_IDLE", 10)
    rehearsals = 0
    made = graphed_step._Tape.__init__

    def counted(self: graphed_step._Tape, *given: Any) -> None:
        nonlocal rehearsals
        rehearsals += 1
        made(self, *given)

    monkeypatch.setattr(graphed_step._Tape, "__init__", counted)
    engine = open_engine()
    states = [engine.new_state() for _ in range(6)]
    for state in states:
        engine.extend(state, list(PROMPTS[0]))
    for _ in range(8):
        for state in states:
            engine.extend(state, [7])
    assert rehearsals == 4
    for _ in range(12):
        engine.extend(states[5], [7])
    assert rehearsals == 5
