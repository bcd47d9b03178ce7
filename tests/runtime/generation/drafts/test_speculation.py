"""Answers with drafts are those without: any policy, memory and sampler, and wherever they end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeinf.offload.policy import table
from moeinf.offload.store.transfer import ExpertReadError
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.drafts.draft_gate import DraftGate
from moeinf.runtime.generation.drafts.lookup import Lookup
from moeinf.runtime.generation.events import Ended, Event, Failed, Piece, Request
from moeinf.runtime.generation.group_gate import GroupGate
from moeinf.runtime.generation.scheduler import Scheduler
from moeinf.runtime.library.library import Library
from moeinf.runtime.ollama_options import read_options
from moeinf.runtime.requests import Limits, SamplingOptions
from moeinf.runtime.sampling.grammar import json_of
from moeinf.runtime.sizes import parse_memory
from scripts.make_checkpoint import byte_tokenizer
from tests.conftest import Open, endless, pull
from tests.tiny import save_tiny

GREEDY = SamplingOptions(temperature=0)
WARM = SamplingOptions(temperature=0.8, top_k=20, repeat_penalty=1.05, seed=5)
PROMPT = [16 + (37 * place) % 200 for place in range(40)]
ANSWER = 60


@pytest.fixture(autouse=True)
def drafts_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check 5, 2 or 15 drafted tokens in turn, at any cost."""
    lengths = [15, 2, 5]

    def worth(gate: DraftGate, _account: object, chances: list[float], _each: float = 0) -> int:
        lengths.insert(0, lengths.pop())
        return min(lengths[0], len(chances)) if gate.single else 0

    monkeypatch.setattr(DraftGate, "worth", worth)


@pytest.fixture(scope="module")
def plain(demo_home: Path) -> Iterator[Engine]:
    """Return an engine that decodes one token per pass."""
    settings = Settings(demo_home)
    manifest, folder = Library(settings).read("demo")
    config = EngineConfig(memory=parse_memory("100%"), context=128, speculation=False)
    with Engine.open(manifest, folder, config, settings) as engine:
        endless(engine)
        yield engine


@pytest.fixture(scope="module")
def expected(plain: Engine) -> dict[SamplingOptions, list[Event]]:
    """Return the answers without drafts."""
    return {options: answer(plain, options, Limits(ANSWER)) for options in (GREEDY, WARM)}


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Engine]:
    """Return a function that opens a tiny model with recurrent layers, which it pulls once."""
    settings = Settings(tmp_path_factory.mktemp("recurrent"))

    def open_one(name: str, memory: str, policy: str, **options: Any) -> Engine:
        known = f"{name}:q8"
        if not (settings.models / name).exists():
            folder = tmp_path_factory.mktemp(name)
            save_tiny(name, folder, seed=1)
            byte_tokenizer().save(str(folder / "tokenizer.json"))
            pull(folder, settings, known)
        manifest, folder = Library(settings).read(known)
        if memory == "least":
            memory = str(manifest.slots.min_bytes)
        config = EngineConfig(memory=parse_memory(memory), policy=policy, context=128, **options)
        engine = Engine.open(manifest, folder, config, settings)
        endless(engine)
        return engine

    return open_one


def run(scheduler: Scheduler, *requests: Request) -> None:
    """Begin the requests and answer them together."""
    for request in requests:
        scheduler.begin(request)
    while scheduler.requests:
        scheduler.place()
        scheduler.round()


def answer(
    engine: Engine,
    options: SamplingOptions,
    limits: Limits,
    prompt: list[int] = PROMPT,
    **about: Any,
) -> list[Event]:
    """Return the events of an answer in a new KV cache."""
    events: list[Event] = []
    scheduler = Scheduler(engine)
    run(scheduler, Request(lambda _: prompt, options, limits, events.append, **about))
    assert engine.store.idle
    return events


def ended(events: list[Event]) -> Ended:
    assert isinstance(events[-1], Ended), events[-1]
    return events[-1]


def same(found: list[Event], expected: list[Event]) -> bool:
    """Compare pieces, tokens and reasons."""
    one, other = ended(found), ended(expected)
    return found[:-1] == expected[:-1] and (one.token_ids, one.reason) == (
        other.token_ids,
        other.reason,
    )


@pytest.mark.matrix
@pytest.mark.parametrize("memory", ["100%", "35%", "least"])
@pytest.mark.parametrize("policy", list(table.POLICIES))
def test_policies_and_memory(
    policy: str, memory: str, plain: Engine, expected: dict[SamplingOptions, list[Event]],
    open_engine: Open,
) -> None:  # fmt: skip
    if memory == "least":
        memory = str(plain.info.manifest.slots.min_bytes)
    engine = open_engine(memory=memory, context=128, policy=policy)
    endless(engine)
    drafted = accepted = 0
    for options in (GREEDY, WARM):
        found = answer(engine, options, Limits(ANSWER))
        assert same(found, expected[options])
        drafted, accepted = drafted + ended(found).drafted, accepted + ended(found).accepted
    assert 0 < accepted < drafted


@pytest.fixture(scope="module")
def without_drafts(
    recurrent: Callable[..., Engine],
) -> Callable[[str, list[int]], dict[SamplingOptions, list[Event]]]:
    """Return a function that answers without drafts, once for each model."""
    found: dict[str, dict[SamplingOptions, list[Event]]] = {}

    def answers(name: str, prompt: list[int]) -> dict[SamplingOptions, list[Event]]:
        if name not in found:
            with recurrent(name, "100%", "lru", speculation=False) as engine:
                found[name] = {
                    options: answer(engine, options, Limits(ANSWER), prompt)
                    for options in (GREEDY, WARM)
                }
        return found[name]

    return answers


MEMORIES = ["100%", "35%", "least"]
# Every policy and memory with one model, and every memory with the others: a model's layers do
# not know the policy.
RECURRENT = [("qwen3-next", policy, memory) for policy in table.POLICIES for memory in MEMORIES] + [
    (name, "learned", memory)
    for name in (
        "qwen3.5",
        "lfm2-biased",
        "kimi-linear-full-first",
        "nemotron",
        "glm5-next",
        "deepseek-v4",
        "qwen4",
    )
    for memory in MEMORIES
]


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "policy", "memory"), RECURRENT)
def test_recurrent_layers(
    name: str,
    policy: str,
    memory: str,
    recurrent: Callable[..., Engine],
    without_drafts: Callable[[str, list[int]], dict[SamplingOptions, list[Event]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rejected token leaves nothing in their memory."""
    if (name, memory) == ("nemotron", "35%"):
        memory = "60%"  # of its 14 experts a pass needs more than a third
    prompt = [token % 97 for token in PROMPT]
    with recurrent(name, memory, policy) as engine:
        for options, expected in without_drafts(name, prompt).items():
            right = [*prompt, *ended(expected).token_ids]
            monkeypatch.setattr(Lookup, "follow", _told)
            monkeypatch.setattr(Lookup, "draft", _drafts_of(right))
            found = answer(engine, options, Limits(ANSWER), prompt)
            assert same(found, expected)
            assert 0 < ended(found).accepted < ended(found).drafted


def _told(lookup: Lookup, history: list[int]) -> None:
    """Follow a text of which every token has a match."""
    lookup.matched, lookup._length = 2, len(history)


def _drafts_of(text: list[int]) -> Callable[[Lookup, int], list[int]]:
    """Draft what follows in a text, with a wrong token at every seventh place."""

    def draft(lookup: Lookup, most: int) -> list[int]:
        places = range(lookup._length, min(lookup._length + most, len(text)))
        return [(text[place] + (place % 7 == 0)) % 97 for place in places]

    return draft


@pytest.fixture
def engine(open_engine: Open) -> Engine:
    found = open_engine(context=128)
    endless(found)
    return found


def test_every_length_and_what_the_state_keeps(plain: Engine, engine: Engine) -> None:
    whole = ended(answer(plain, GREEDY, Limits(ANSWER))).token_ids
    for most in (1, 2, 3, 5, 10, 17, 26, 38):
        events: list[Event] = []
        scheduler = Scheduler(engine)
        run(scheduler, Request(lambda _: PROMPT, GREEDY, Limits(most), events.append))
        assert ended(events).token_ids == whole[:most]
        assert ended(events).reason == "length"
        assert scheduler.cached_tokens == len(PROMPT) + most - 1
        assert scheduler.tokens == most


@pytest.mark.parametrize("most", [0, 1, 4])
def test_a_request_that_limits_its_drafts(most: int, plain: Engine, engine: Engine) -> None:
    limits = read_options({"draft_num_predict": most, "num_predict": ANSWER}).limits
    passes, check = list[int](), engine.check

    def counted(state: Any, ids: list[int], accept: Any) -> None:
        passes.append(len(ids) - 1)
        check(state, ids, accept)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "check", counted)
        found = answer(engine, GREEDY, limits)
    assert same(found, answer(plain, GREEDY, Limits(ANSWER)))
    assert max(passes, default=0) == most


def test_stop_texts(plain: Engine, engine: Engine) -> None:
    whole = "".join(e.text for e in answer(plain, GREEDY, Limits(ANSWER)) if isinstance(e, Piece))
    stops = {whole[start : start + 4] for start in range(0, len(whole) - 4, 9)}
    for stop in stops:
        limits = Limits(ANSWER, (stop,))
        found = answer(engine, GREEDY, limits)
        assert same(found, answer(plain, GREEDY, limits))
        assert ended(found).reason == "stop"


def test_end_tokens(plain: Engine, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = ended(answer(plain, GREEDY, Limits(ANSWER))).token_ids
    for token in dict.fromkeys(tokens[10:20]):
        with monkeypatch.context() as patch:
            for one in (plain, engine):
                patch.setattr(one, "info", _ending(one, token))
            found = answer(engine, GREEDY, Limits(ANSWER))
            assert same(found, answer(plain, GREEDY, Limits(ANSWER)))


def _ending(engine: Engine, token: int) -> Any:
    return replace(engine.info, ends=frozenset({token}))


def test_the_end_of_the_context(plain: Engine, engine: Engine) -> None:
    found = answer(engine, GREEDY, Limits())
    assert same(found, answer(plain, GREEDY, Limits()))
    assert ended(found).tokens == 128 - len(PROMPT)


def test_log_probabilities(plain: Engine, engine: Engine) -> None:
    found = answer(engine, WARM, Limits(ANSWER), logprobs=3)
    assert same(found, answer(plain, WARM, Limits(ANSWER), logprobs=3))
    assert all(isinstance(e, Piece) and e.info is not None for e in found[:-1])


@pytest.mark.parametrize("after", [3, 8, 20])
def test_cancelled_between_two_tokens(after: int, plain: Engine, engine: Engine) -> None:
    """No token follows the one at which the client has left."""
    found = []
    for one in (engine, plain):
        request = Request(lambda _: PROMPT, GREEDY, Limits(ANSWER))
        request.stopped = lambda request=request: request.times.tokens >= after
        events: list[Event] = []
        request.emit = events.append
        run(Scheduler(one), request)
        found.append(events)
    assert same(*found)
    assert (ended(found[0]).reason, ended(found[0]).tokens) == ("cancelled", after)


def test_an_expert_that_cannot_be_read(
    plain: Engine, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be that of a wrong draft: the pass is repeated with one token."""
    check, checks = engine.check, 0

    def failing(*given: Any) -> None:
        nonlocal checks
        checks += 1
        if checks % 2:
            raise ExpertReadError("layer-1.bin", "the disk does not answer")
        check(*given)

    monkeypatch.setattr(engine, "check", failing)
    found = answer(engine, GREEDY, Limits(ANSWER))
    assert same(found, answer(plain, GREEDY, Limits(ANSWER)))
    assert checks > 4


def test_an_error_while_tokens_are_taken(engine: Engine) -> None:
    """Logits that are no numbers end the answer; the state and the store are as before the pass."""
    events: list[Event] = []
    scheduler = Scheduler(engine)
    request = Request(lambda _: PROMPT, GREEDY, Limits(ANSWER), events.append)
    head, rows = engine.model.body.head, 0  # type: ignore[attr-defined]

    def broken(x: Any) -> Any:
        nonlocal rows
        rows = max(rows, len(x))
        out = head(x)
        if len(x) > 1:
            out[1] = np.nan
        return out

    object.__setattr__(engine.model.body, "head", broken)  # type: ignore[attr-defined]
    run(scheduler, request)
    assert rows > 1
    assert isinstance(events[-1], Failed)
    assert engine.store.idle
    assert scheduler.cached_tokens < len(PROMPT) + len(events)


def test_rejected_rows_are_not_routing(open_engine: Open) -> None:
    """The EAMs of an answer do not depend on drafts."""
    found = []
    for speculation in (True, False):
        engine = open_engine(context=128, speculation=speculation)
        endless(engine)
        recording = engine.record("answers")
        end = ended(answer(engine, WARM, Limits(ANSWER)))
        assert (end.drafted > end.accepted) == speculation
        found.append((recording, list(recording.request_eams().values())))
    (drafted, ours), (_, theirs) = found
    assert any(not done.accepted.all() for done in drafted.passes)
    (one,), (other,) = ours, theirs
    assert (one.prefill == other.prefill).all()
    assert (one.decode == other.decode).all()


def test_grammars_and_company_decode_without_drafts(
    plain: Engine, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GroupGate, "bound", False)  # a busy machine looks like a slow drive
    found = answer(engine, GREEDY, Limits(20), constrain=json_of("json"))
    assert same(found, answer(plain, GREEDY, Limits(20), constrain=json_of("json")))
    assert ended(found).drafted == 0
    events: tuple[list[Event], list[Event]] = ([], [])
    requests = [Request(lambda _: PROMPT, GREEDY, Limits(30), each.append) for each in events]
    run(Scheduler(engine, 2), *requests)
    expected = answer(plain, GREEDY, Limits(30))
    assert all(same(each, expected) for each in events)
    assert [ended(each).drafted for each in events] == [0, 0]


@pytest.mark.parametrize(
    ("model", "about"),
    [("demo:f32", {}), ("demo", {"speculation": False}), ("demo", {"skip_below": 0.05})],
)
def test_engines_that_do_not_draft(model: str, about: dict[str, Any], open_engine: Open) -> None:
    engine = open_engine(model, context=128, **about)
    endless(engine)
    assert not engine.info.drafts
    assert ended(answer(engine, GREEDY, Limits(30))).drafted == 0
