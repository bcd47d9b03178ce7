"""Answers with a draft model are those without, whatever it drafts and wherever it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moeinf.offload.store.transfer import ExpertReadError
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.draft_engine import DraftEngine
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.engine.mtp_engine import MtpEngine
from moeinf.runtime.generation.drafts import model_drafts
from moeinf.runtime.generation.drafts.draft_gate import DraftGate, DraftStats
from moeinf.runtime.generation.drafts.lookup import Lookup
from moeinf.runtime.generation.drafts.model_drafts import AcceptanceByProbability, ModelDrafts
from moeinf.runtime.generation.events import Ended, Event, Request
from moeinf.runtime.generation.scheduler import Scheduler
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.library.draft_model import UnusableDraft, find_draft
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library, ModelInUse
from moeinf.runtime.placement.draft_plan import place_both
from moeinf.runtime.requests import Limits, SamplingOptions
from moeinf.runtime.sizes import parse_memory
from moeinf.runtime.text.vocabularies import difference
from scripts.make_checkpoint import byte_tokenizer
from tests.conftest import endless, pull
from tests.tiny import save_tiny

GREEDY = SamplingOptions(temperature=0)
WARM = SamplingOptions(temperature=0.8, top_k=20, repeat_penalty=1.05, seed=5)
PROMPTS = [[(seed + 37 * place) % 97 for place in range(40)] for seed in (16, 3)]
ANSWER = 40
# Tiny models: one and its q4, a foreign one, and one with recurrent layers and its q4.
MODELS = {"tiny": ("olmoe-yarn", 1), "other": ("olmoe-yarn", 2), "recurrent": ("qwen3-next", 1)}
PAIRS = [("tiny", "tiny:q4"), ("tiny", "other:q4"), ("recurrent", "recurrent:q4")]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    found = Settings(tmp_path_factory.mktemp("home"))
    for name, (kind, seed) in MODELS.items():
        folder = tmp_path_factory.mktemp(name)
        save_tiny(kind, folder, seed=seed)
        byte_tokenizer().save(str(folder / "tokenizer.json"))
        for tag in ("bf16", "q4"):
            pull(folder, found, f"{name}:{tag}")
    pull(DEMO_CHECKPOINT, found, "demo:q4")
    return found


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft 5, 2 or 15 tokens in turn, at any cost, and with the draft model alone."""
    lengths = [15, 2, 5]

    def worth(gate: DraftGate, _account: object, chances: list[float], each: float = 0.0) -> int:
        if not gate.single:
            return 0
        if each:
            lengths.insert(0, lengths.pop())
        return min(lengths[0], len(chances))

    monkeypatch.setattr(DraftGate, "worth", worth)
    monkeypatch.setattr(DraftGate, "row_cost", lambda *_: 0.0)
    monkeypatch.setattr(model_drafts, "_AT_ONCE", 1000)
    monkeypatch.setattr(Lookup, "draft", lambda *_: [])


Opened = Callable[..., Engine]


@pytest.fixture
def opened(settings: Settings) -> Iterator[Opened]:
    engines: list[Engine] = []

    def open_one(name: str, memory: str = "100%", **options: Any) -> Engine:
        manifest, folder = Library(settings).read(f"{name}:bf16")
        if memory == "least":
            memory = str(manifest.slots.min_bytes)
        config = EngineConfig(memory=parse_memory(memory), context=128, **options)
        engines.append(Engine.open(manifest, folder, config, settings))
        endless(engines[-1])
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def without_drafts() -> dict[str, list[list[Event]]]:
    """Return the answers of models that have answered without drafts, by name."""
    return {}


def answers(engine: Engine, most: int = ANSWER) -> list[list[Event]]:
    """Return the events of answers to two prompts in turn, greedy ones and others."""
    scheduler, found = Scheduler(engine), list[list[Event]]()
    for options in (GREEDY, WARM):
        for prompt in PROMPTS:
            events: list[Event] = []
            request = Request(lambda _, prompt=prompt: prompt, options, Limits(most), events.append)
            scheduler.begin(request)
            while scheduler.requests:
                scheduler.place()
                scheduler.round()
            found.append(events)
    return found


def told(events: list[Event]) -> tuple[list[Event], tuple[int, ...], str]:
    end = events[-1]
    assert isinstance(end, Ended), end
    return events[:-1], end.token_ids, end.reason


def drafts(found: list[list[Event]]) -> tuple[int, int]:
    """Return the numbers of drafted and of accepted tokens."""
    ends = [events[-1] for events in found]
    counts = [(end.drafted, end.accepted) for end in ends if isinstance(end, Ended)]
    return sum(drafted for drafted, _ in counts), sum(accepted for _, accepted in counts)


@pytest.mark.matrix
@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("memory", ["100%", "35%", "least"])
@pytest.mark.parametrize("policy", ["learned", "lru"])
@pytest.mark.parametrize("pair", PAIRS, ids=" drafted by ".join)
def test_the_same_answers(
    pair: tuple[str, str], policy: str, memory: str, opened: Opened,
    without_drafts: dict[str, list[list[Event]]],
) -> None:  # fmt: skip
    name, draft = pair
    if name not in without_drafts:
        without_drafts[name] = answers(opened(name, speculation=False))
    found = answers(opened(name, memory, policy=policy, draft=draft))
    assert list(map(told, found)) == list(map(told, without_drafts[name]))
    drafted, accepted = drafts(found)
    assert accepted < drafted
    if name == draft.partition(":")[0]:
        assert accepted > drafted // 20  # by chance one token in 97 would be right


@pytest.mark.usefixtures("often")
def test_a_draft_model_that_cannot_be_read(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """It drafts no more; the answer goes on."""
    calls, extend = 0, DraftEngine.extend

    def failing(self: DraftEngine, ids: Any, stopped: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise ExpertReadError("layer-1.bin", "the disk does not answer")
        return extend(self, ids, stopped)

    monkeypatch.setattr(DraftEngine, "extend", failing)
    found = answers(opened("tiny", draft="tiny:q4"))
    assert list(map(told, found)) == list(map(told, answers(opened("tiny", speculation=False))))
    assert calls == 9


def test_by_the_measured_gate(opened: Opened) -> None:
    """Look-up and the draft model together, at real costs."""
    found = answers(opened("tiny", draft="tiny:q4"), 80)
    expected = answers(opened("tiny", speculation=False), 80)
    assert list(map(told, found)) == list(map(told, expected))


def test_the_whole_text_is_read_from_what_drafts_gained() -> None:
    gate, one = DraftGate(), SimpleNamespace(drafts=DraftStats())
    for _ in range(10):
        gate.passed(1.0, 0.0)
    state = SimpleNamespace(length=0, truncate=lambda _: None)
    engine = SimpleNamespace(begin=0, state=state, usual_chance=0.7)
    drafts, text = ModelDrafts(engine, gate), list(range(1000))  # type: ignore[arg-type]
    assert drafts._begin(one, text[:32], 0.1) == text[:32]  # type: ignore[arg-type]
    for gained, begin in ((0.0, 968), (24.0, 968), (26.0, 0)):  # 1,000 quarters of 0.1 s
        one.drafts.gained = gained
        assert drafts._begin(one, text, 0.1) == text[begin:]  # type: ignore[arg-type]
        drafts._held = text[begin:990]
        assert engine.begin == begin
    one.drafts.gained = 0.0
    assert drafts._begin(one, [*text, 7, 8], 0.1) == [*text, 7, 8]  # type: ignore[arg-type]


@pytest.mark.parametrize("usual", [DraftEngine.usual_chance, MtpEngine.usual_chance])
def test_trust_learns_from_what_followed(usual: float) -> None:
    acceptance = AcceptanceByProbability(usual)
    assert acceptance.mean == usual
    for number in range(400):
        acceptance.add(0.99, True)
        acceptance.add(0.4, number % 4 == 0)
    assert acceptance.chance(0.96) > 0.97
    assert 0.15 < acceptance.chance(0.35) < 0.35
    assert 0.5 < acceptance.mean < 0.75
    before = acceptance.chance(0.8)
    assert before == pytest.approx(0.78)
    for _ in range(3000):
        acceptance.fade()
    assert acceptance.mean == pytest.approx(usual, abs=0.01)


def test_an_mtp_layer_is_tried_at_its_usual_chance() -> None:
    """With a head that takes a fourth of a pass, as of a small model with a large vocabulary."""
    gate = DraftGate()
    for _ in range(10):
        gate.passed(1.0, 0.0)
    for usual, tried in ((DraftEngine.usual_chance, 0), (MtpEngine.usual_chance, 1)):
        assert gate.worth(DraftStats(), [AcceptanceByProbability(usual).mean], 0.25) == tried


def test_the_draft_models_time_is_a_cost() -> None:
    gate, account = DraftGate(), DraftStats()
    for _ in range(10):
        gate.passed(2.0, 0.0)
    chances = [0.95]
    assert gate.worth(account, chances) == 1  # 1.95 tokens for 1.4 passes
    assert gate.worth(account, chances, 0.2) == 1  # for 1.5
    assert gate.worth(account, chances, 1.0) == 0  # for 1.9
    gate.checked(account, 1, 2, 2.0 * 1.6, 0.0, 0.4)
    assert account.gained == pytest.approx(2 - 1.6 - 0.2)
    gate.lost(account, 1.0)
    assert account.gained == 0.0  # 0.3 more than was gained are paid by all requests


def test_memory_of_both_is_promised(settings: Settings, opened: Opened) -> None:
    library = Library(settings)
    (manifest, _), (draft, _) = library.read("tiny:bf16"), library.read("other:q4")
    config = EngineConfig(context=128, threads=1)
    alone, _ = place_both(manifest, config, 8 << 30, 2)
    both, second = place_both(manifest, config, 8 << 30, 2, 0, draft)
    assert second is not None
    assert second.slots == draft.slots.experts
    assert both.draft_bytes == second.peak_bytes > draft.dense_bytes + draft.slots.max_bytes
    assert both.peak_bytes == alone.peak_bytes + both.draft_bytes
    engine = opened("tiny", draft="other:q4", threads=1)
    assert engine.info.placement.draft_bytes == both.draft_bytes
    with pytest.raises(ModelInUse):
        library.remove("other:q4")


@pytest.mark.parametrize(
    ("model", "draft", "words", "hint"),
    [
        ("tiny:bf16", "demo:q4", "vocabulary", "--draft other:q4, --draft tiny:q4"),
        ("tiny:q4", "tiny:q4", "itself", "smaller model"),
        ("tiny:q4", "other:bf16", "reads more", "smaller model"),
    ],
)
def test_models_that_cannot_draft(
    model: str, draft: str, words: str, hint: str, settings: Settings
) -> None:
    library = Library(settings)
    manifest, folder = library.read(model)
    with pytest.raises(UnusableDraft, match=words) as caught:
        find_draft(draft, manifest, folder, library)
    assert hint in caught.value.hint


def test_options_without_drafts() -> None:
    for options in ({"speculation": False}, {"skip_below": 0.1}):
        with pytest.raises(InvalidValue, match="--draft"):
            EngineConfig(draft="demo", **options)  # type: ignore[arg-type]


def test_special_tokens_count(tmp_path: Path) -> None:
    plain, special = byte_tokenizer(), byte_tokenizer()
    plain.add_tokens(["<x>"])
    special.add_special_tokens(["<x>"])
    paths = [tmp_path / name for name in ("plain", "special", "less")]
    for path, tokenizer in zip(paths, (plain, special, byte_tokenizer()), strict=True):
        tokenizer.save(str(path))
    assert difference(paths[0], paths[0]) is None
    assert difference(paths[0], paths[1]) == "token 256 is '<x>', not the special token '<x>'"
    assert difference(paths[0], paths[2]) == "token 256 is '<x>', not missing"
