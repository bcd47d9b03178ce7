"""Waiting prompts share a window: the bits of each alone, and each expert is read once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from moeinf.offload.store.host_tier import _FEW
from moeinf.offload.store.transfer import ExpertReadError
from moeinf.runtime.config import PREFILL_CHUNK
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.engine.pipeline.links import StageFailed
from moeinf.runtime.generation.events import Ended, Event, Piece, Request, TokenInfo
from moeinf.runtime.generation.scheduler import Scheduler
from moeinf.runtime.generation.windows import divided
from moeinf.runtime.requests import Limits, SamplingOptions
from tests.conftest import Open, endless

GREEDY = SamplingOptions(temperature=0)
PROMPTS = [  # two chunks each, a few rows, one row
    [16 + (37 * place + place // 7 + 5 * number) % 200 for place in range(count)]
    for number, count in enumerate((PREFILL_CHUNK + 40, PREFILL_CHUNK + 1, 9, 1))
]
WINDOW = 3 * PREFILL_CHUNK


@pytest.mark.parametrize(
    ("rests", "room", "expected"),
    [
        ([5000], 1024, [1024]),
        ([5000, 20], 1024, [768, 20]),  # whole chunks, unless the prompt ends
        ([5000, 5000], 1024, [768, 256]),
        ([300, 300, 300], 1024, [300, 300, 300]),
        ([300, 5000, 300], 1024, [300, 256, 300]),
        ([5000, 20, 5000], 256, [256, 0, 0]),
        ([100, 20, 5000, 136], 256, [100, 20, 0, 136]),
    ],
)
def test_a_window_is_divided(rests: list[int], room: int, expected: list[int]) -> None:
    assert divided(rests, room) == expected


def begun(scheduler: Scheduler, prompt: list[int], **about: Any) -> list[Event]:
    """Begin a request for four tokens; return the list that its events will fill."""
    events: list[Event] = []
    options: dict[str, Any] = {"logprobs": 200, **about}
    scheduler.begin(Request(lambda _: prompt, GREEDY, Limits(4), events.append, **options))
    return events


def answered(scheduler: Scheduler, *heard: Sequence[Event]) -> list[list[TokenInfo | None]]:
    """Run all rounds; return every token's log-probabilities for each request."""
    while scheduler.running:
        scheduler.round()
    assert all(isinstance(events[-1], Ended) for events in heard)
    return [[event.info for event in events if isinstance(event, Piece)] for events in heard]


def alone(engine: Engine) -> list[list[TokenInfo | None]]:
    """Answer each prompt by a scheduler of its own."""
    endless(engine)
    made = [Scheduler(engine) for _ in PROMPTS]
    return [answered(s, begun(s, ids))[0] for s, ids in zip(made, PROMPTS, strict=True)]


def watched(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list of the tokens per request in every pass from now on."""
    passes: list[list[int]] = []
    extend_all = engine.extend_all

    def counted(texts: Sequence[tuple[Any, Sequence[int]]]) -> Any:
        passes.append([len(ids) for _, ids in texts])
        return extend_all(texts)

    monkeypatch.setattr(engine, "extend_all", counted)
    return passes


@pytest.mark.first
@pytest.mark.parametrize("model", ["demo", "demo:bf16", "demo:f32"])
def test_prompts_together_as_alone(
    model: str, open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each expert that any of them uses is read once at most, beyond the resident ones."""
    full = open_engine(model, trace=False)  # it reads what a request uses
    expected, used = alone(full), full.store.stats.loads
    for memory in ("35%", str(full.info.placement.min_memory_bytes)):
        engine = open_engine(model, memory=memory, policy="lru", window=WINDOW, trace=False)
        endless(engine)
        passes = watched(engine, monkeypatch)
        for _ in range(2):  # nothing resident, then what the first requests left
            scheduler, resident = Scheduler(engine, len(PROMPTS)), engine.store.resident
            heard = [begun(scheduler, ids) for ids in PROMPTS]
            before = engine.store.stats.loads
            scheduler.round()
            assert engine.store.stats.loads - before <= used - resident + _FEW
            assert answered(scheduler, *heard) == expected
            assert passes[0] == [len(ids) for ids in PROMPTS]
            passes.clear()
        assert engine.store.idle


def test_a_request_that_decodes_waits_for_a_chunk(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts share that chunk if they end in it."""
    engine = open_engine(memory="35%", window=WINDOW, trace=False)
    expected = alone(engine)
    passes, scheduler = watched(engine, monkeypatch), Scheduler(engine, 4)
    heard = [begun(scheduler, PROMPTS[3])]
    scheduler.round()
    heard += [begun(scheduler, PROMPTS[number]) for number in (0, 2)]
    found = answered(scheduler, *heard)
    assert found == [expected[number] for number in (3, 0, 2)]
    assert passes[:6] == [[1], [PREFILL_CHUNK], [1], [40, 9], [1], [1, 1, 1]]


def test_a_prompt_that_leaves_a_window(open_engine: Open) -> None:
    """One is cancelled at a layer of the shared pass; the others get what they get alone."""
    engine = open_engine(memory="35%", window=WINDOW, trace=False)
    expected = alone(engine)
    asked = 0

    def asking() -> bool:  # of the oldest request, at each layer
        nonlocal asked
        asked += 1
        return False

    watching: dict[str, Any] = {"stopped": asking}
    leaving: dict[str, Any] = {"stopped": lambda: asked > 4}
    scheduler = Scheduler(engine, len(PROMPTS))
    about = (watching, leaving, {}, {})
    heard = [begun(scheduler, ids, **how) for ids, how in zip(PROMPTS, about, strict=True)]
    found = answered(scheduler, *heard)
    last = heard[1][-1]
    assert isinstance(last, Ended)
    assert last.reason == "cancelled"
    for number in (0, 2, 3):
        assert found[number] == expected[number]
    assert engine.store.idle


def test_all_prompts_of_a_window_leave(open_engine: Open) -> None:
    engine = open_engine(memory="35%", window=WINDOW, trace=False)
    scheduler, counts = Scheduler(engine, 2), [0, 0]

    def leaving(number: int) -> Callable[[], bool]:
        def stopped() -> bool:
            counts[number] += 1
            return counts[number] > 3  # the first layers of the window

        return stopped

    heard = [begun(scheduler, PROMPTS[0], stopped=leaving(n)) for n in range(2)]
    answered(scheduler, *heard)
    assert [event.reason for (event,) in heard if isinstance(event, Ended)] == ["cancelled"] * 2
    assert scheduler.cached_tokens == 0
    assert engine.store.idle


@pytest.mark.parametrize(
    "error", [ExpertReadError("experts/L000/E000", "damaged"), StageFailed("damaged there")]
)
def test_a_failed_read_costs_only_the_requests_that_need_it(
    error: Exception, open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(memory="35%", window=WINDOW, trace=False)
    expected = alone(engine)
    extend_all = engine.extend_all

    def failing(texts: Sequence[tuple[Any, Sequence[int]]]) -> Any:
        if any(len(ids) == len(PROMPTS[2]) for _, ids in texts):
            raise error
        return extend_all(texts)

    monkeypatch.setattr(engine, "extend_all", failing)
    scheduler = Scheduler(engine, len(PROMPTS))
    heard = [begun(scheduler, ids) for ids in PROMPTS]
    failed = heard.pop(2)
    assert answered(scheduler, *heard) == expected[:2] + expected[3:]
    assert not any(isinstance(event, Ended) for event in failed)
