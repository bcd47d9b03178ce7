"""The scheduler alone: prefix reuse, counters, and the moment at which a request may leave."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moeinf.runtime.config import PREFILL_CHUNK
from moeinf.runtime.generation.chat import Conversation
from moeinf.runtime.generation.events import Ended, Event, Failed, Request
from moeinf.runtime.generation.group_gate import GroupGate
from moeinf.runtime.generation.in_flight import shared_tokens
from moeinf.runtime.generation.scheduler import Scheduler
from moeinf.runtime.requests import Limits, SamplingOptions
from tests.conftest import Open, endless

GREEDY = SamplingOptions(temperature=0)
LONG = [16 + place % 200 for place in range(PREFILL_CHUNK + 40)]


@pytest.mark.parametrize(
    ("reusable", "prompt", "step", "expected"),
    [
        ([], [1], 1, 0),
        ([1, 2, 3], [1, 2, 3], 1, 2),  # the last token is always computed
        ([1, 2, 3], [1, 2, 4, 5], 1, 2),
        ([1, 2, 3], [1, 2, 3, 4], 1, 3),
        ([1, 2, 3], [1, 2, 3, 4], 256, 0),
        (list(range(600)), list(range(600)), 256, 512),
        (list(range(512)), list(range(512)), 256, 256),
        (list(range(600)), [*range(300), 7, *range(301, 600)], 1, 300),
        (list(range(600)), [*range(300), 7, *range(301, 600)], 256, 256),
        (list(range(600)), [*range(255), 7, *range(256, 600)], 256, 0),
    ],
)
def test_shared_tokens(reusable: list[int], prompt: list[int], step: int, expected: int) -> None:
    assert shared_tokens(reusable, prompt, step) == expected


def prepared(prompt: list[int]) -> Callable[[object], list[int]]:
    return lambda _: prompt


def answer(scheduler: Scheduler, prompt: list[int], **about: object) -> Ended:
    """Return the last event of an answer of six tokens."""
    events: list[Event] = []
    request = Request(lambda _: prompt, GREEDY, Limits(6), events.append, **about)  # type: ignore[arg-type]
    scheduler.begin(request)
    while not events or not isinstance(events[-1], Ended | Failed):
        scheduler.round()
    assert isinstance(events[-1], Ended)
    return events[-1]


@pytest.mark.parametrize("reproducible", [False, True])
def test_what_the_next_request_takes_over(reproducible: bool, open_engine: Open) -> None:
    """All tokens that agree, also generated ones; a reproducible engine only whole chunks."""
    engine = open_engine(reproducible=reproducible)
    endless(engine)
    scheduler = Scheduler(engine)
    first = answer(scheduler, LONG)
    longer = [*LONG, *first.token_ids, 20, 21]
    second = answer(scheduler, longer)
    other = answer(scheduler, [*longer[:-5], 30])
    known = (len(LONG) + 5, len(longer) - 5)  # the sixth token was chosen, but is not in the state
    expected = (PREFILL_CHUNK, PREFILL_CHUNK) if reproducible else known
    assert (first.cached_tokens, first.tokens) == (0, 6)
    assert (second.cached_tokens, other.cached_tokens) == expected
    fresh = answer(Scheduler(engine), longer)
    assert fresh.token_ids == second.token_ids
    assert engine.store.idle


def test_half_a_prompt_is_not_counted(open_engine: Open) -> None:
    engine = open_engine()
    scheduler, passes = Scheduler(engine), 0
    begin = engine.store.begin_pass

    def counted(*given: object) -> None:
        nonlocal passes
        passes += 1
        begin(*given)  # type: ignore[arg-type]

    engine.store.begin_pass = counted  # type: ignore[method-assign]
    cut = answer(scheduler, LONG, stopped=lambda: passes == 2)
    assert (cut.reason, cut.counted, cut.tokens) == ("cancelled", False, 0)
    assert cut.prefill_seconds > 0  # of the first chunk, which is kept
    again = answer(scheduler, LONG)
    assert (again.cached_tokens, again.counted) == (PREFILL_CHUNK, True)


def test_an_answer_that_is_left_early(open_engine: Open) -> None:
    engine = open_engine()
    talk = Conversation(engine)
    one = talk.ask("sort owl, fig, ant", GREEDY, Limits())
    pieces = iter(one)
    said = next(pieces)
    with pytest.raises(RuntimeError):
        next(iter(talk.ask("17+25=", GREEDY, Limits())))
    pieces.close()  # type: ignore[attr-defined]
    assert (one.finish_reason, len(one.tokens), one.text) == ("interrupted", len(said), said)
    talk.clear()
    assert "".join(talk.ask("17+25=", GREEDY, Limits())) == "42"


def test_requests_that_decode_one_after_the_other(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They end in their order, with the tokens that they have together."""
    engine = open_engine(memory="20%", parallel=3)
    endless(engine)

    def answers() -> list[tuple[int, tuple[int, ...]]]:
        scheduler, ended = Scheduler(engine, 3), []
        for number in range(3):
            events: list[Event] = []
            about = prepared(LONG[number : number + 9]), GREEDY, Limits(6), events.append
            scheduler.begin(Request(*about))
            ended.append((number, events))
        left, order = list(ended), []
        while left:
            scheduler.round()
            for number, events in list(left):
                if events and isinstance(last := events[-1], Ended):
                    order.append((number, last.token_ids))
                    left.remove((number, events))
        return order

    together = answers()
    monkeypatch.setattr(GroupGate, "alone", True)
    assert answers() == together
    assert [number for number, _ in together] == [0, 1, 2]


def test_no_token_no_pass(open_engine: Open) -> None:
    scheduler = Scheduler(open_engine())
    events: list[Event] = []
    scheduler.begin(Request(lambda _: [], GREEDY, Limits(), events.append))
    assert [type(event) for event in events] == [Failed]
    assert (scheduler.requests, scheduler.running) == ([], 0)


@pytest.mark.parametrize("unloading", [False, True])
def test_a_request_that_ends_before_its_place(unloading: bool, open_engine: Open) -> None:
    """Its client left; or the model is unloaded, which must not look like an empty answer."""
    engine, events = open_engine(), list[Event]()
    scheduler = Scheduler(engine)
    if unloading:
        scheduler.closing = RuntimeError("the model was unloaded")
    request = Request(lambda _: [5], GREEDY, Limits(6), events.append, stopped=lambda: True)
    scheduler.begin(request)
    (event,) = events
    assert scheduler.requests == []
    if unloading:
        assert isinstance(event, Failed)
        assert event.error is scheduler.closing
    else:
        assert isinstance(event, Ended)
        assert event.reason == "cancelled"
