"""Requests that find the KV of earlier ones: in RAM, on disk, and after a new start."""

from __future__ import annotations

import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from moeinf.models.layers.kv_cache import KvCache
from moeinf.runtime.config import PREFILL_CHUNK, PrefixBudget, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.events import Ended, Event, Failed, Request
from moeinf.runtime.generation.scheduler import Scheduler
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.prefix import cache, opening
from moeinf.runtime.requests import Limits, SamplingOptions
from tests.runtime.generation.test_scheduler import answer
from tests.runtime.prefix.conftest import OpenHere

SYSTEM = [16 + (37 * place + place // 7) % 200 for place in range(PREFILL_CHUNK + 190)]
OTHER = [17 + (41 * place) % 190 for place in range(300)]


def asked(engine: Engine, ids: list[int], **about: object) -> Ended:
    """Answer with a scheduler of its own: no place has an earlier text."""
    return answer(Scheduler(engine), ids, **about)


def stayed(engine: Engine, ids: list[int]) -> tuple[int, ...]:
    """Return the second answer to a text whose KV has stayed where it was.

    Its last token is computed alone, as after a restore; the first answer may have other bits.
    """
    scheduler = Scheduler(engine)
    answer(scheduler, ids)
    return answer(scheduler, ids).token_ids


def written(engine: Engine, files: int, folder: Path) -> None:
    """Wait until so many files are there."""
    until = time.monotonic() + 20
    while len(list(folder.glob("*.kv"))) != files:
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("model", ["demo:bf16", "demo:f32"])
def test_another_conversation_between(model: str, open_here: OpenHere) -> None:
    """One place serves two texts in turn: the first one's KV comes back, answer included."""
    engine = open_here(model)
    scheduler = Scheduler(engine)
    first = answer(scheduler, SYSTEM)
    answer(scheduler, OTHER)
    longer = [*SYSTEM, *first.token_ids[:-1], 20, 21]
    again = answer(scheduler, longer)
    assert again.cached_tokens == len(longer) - 2
    assert (scheduler.prompt_tokens, scheduler.reused_tokens) == (
        len(SYSTEM) + len(OTHER) + len(longer),
        again.cached_tokens // 64 * 64,
    )
    alone = Scheduler(open_here(model, prefix=None))  # KV that was decoded may have other bits
    answer(alone, SYSTEM)
    expected = answer(alone, longer)
    assert expected.cached_tokens == again.cached_tokens
    assert again.token_ids == expected.token_ids


def test_the_bytes_are_those_of_the_state(open_here: OpenHere) -> None:
    engine = open_here()
    prefixes = engine.prefixes
    assert prefixes is not None
    state, back = engine.new_state(), engine.new_state()
    engine.extend(state, SYSTEM)
    prefixes.keep(state, SYSTEM)
    found = prefixes.find([*SYSTEM, 1])
    assert found.tokens == len(SYSTEM)
    assert prefixes.restore(back, found) == len(SYSTEM)
    assert np.array_equal(engine.step([(state, 30)]), engine.step([(back, 30)]))
    assert prefixes.bytes_used == len(SYSTEM) * engine.info.manifest.kv_bytes_per_token


def test_it_returns_after_a_new_start(open_here: OpenHere, folder: Path) -> None:
    """Also where the RAM holds one block at a time; files have the owner's rights alone."""
    expected = stayed(open_here(prefix=None), SYSTEM)
    engine = open_here()
    asked(engine, SYSTEM)
    engine.close()
    files = list(folder.iterdir())
    assert len(files) == 2
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    block = PREFILL_CHUNK * engine.info.manifest.kv_bytes_per_token
    for memory in (block, 64 << 20):
        engine = open_here(prefix=PrefixBudget(memory))
        again = asked(engine, SYSTEM)
        assert again.cached_tokens == len(SYSTEM) - 1
        assert again.token_ids == expected
        assert engine.prefixes is not None
        assert engine.prefixes.bytes_used <= memory
        assert engine.prefixes.stats.bytes_read > block
        assert asked(engine, [*SYSTEM[:300], 17]).cached_tokens == 300
        engine.close()


@pytest.mark.parametrize("disk_bytes", [0, 4 << 30])
def test_others_learn_what_is_still_held(disk_bytes: int, open_here: OpenHere, home: Path) -> None:
    """A node leaves RAM: it is held only where its file is there."""
    manifest, _ = Library(Settings(home)).read("demo:bf16")
    engine = open_here(prefix=PrefixBudget(600 * manifest.kv_bytes_per_token, disk_bytes))
    prefixes = engine.prefixes
    assert prefixes is not None
    asked(engine, SYSTEM)
    path = prefixes.find(SYSTEM).path
    keys = [node.key for node in path]
    assert len(keys) == 2
    assert prefixes.held([*keys, b"other"]) == set(keys)
    until = time.monotonic() + 20
    while disk_bytes and not all(node.on_disk for node in path):
        assert time.monotonic() < until
        time.sleep(0.01)
    asked(engine, OTHER)
    assert None in [node.data for node in path]
    assert prefixes.held(keys) == set(keys if disk_bytes else keys[:1])


def test_the_second_use_keeps_it_in_ram(open_here: OpenHere) -> None:
    engine = open_here()
    asked(engine, SYSTEM)
    engine.close()
    prefixes = open_here().prefixes
    assert prefixes is not None
    state, used, read = open_here(prefix=None).new_state(), [], []
    assert isinstance(state, KvCache)
    for _ in range(3):
        state.truncate(0)
        prefixes.restore(state, prefixes.find([*SYSTEM, 1]))
        used.append(prefixes.bytes_used)
        read.append(prefixes.stats.bytes_read)
    size = len(SYSTEM) * engine.info.manifest.kv_bytes_per_token
    assert used[0] == 0
    assert used[1] == used[2] == read[0] >= size
    assert read == [read[0], 2 * read[0], 2 * read[0]]


@pytest.mark.parametrize(
    "other",
    [{"model": "demo:f32"}, {"reproducible": True}, {"prefix": None}, {"prefix": PrefixBudget(0)}],
)
def test_what_does_not_match(other: dict[str, object], open_here: OpenHere, home: Path) -> None:
    """Another dtype, even with the same folder; another arithmetic; no cache."""
    engine = open_here()
    asked(engine, SYSTEM)
    engine.close()
    (home / "state/demo/f32").mkdir()
    (home / "state/demo/f32/prefix").symlink_to(home / "state/demo/bf16/prefix")
    assert asked(open_here(**other), SYSTEM).cached_tokens == 0


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (Manifest, "digest", "0" * 64),  # the same name, pulled again
        (opening, "version", lambda: "0.0.1"),
        (opening, "kernel_path", lambda: "another"),
    ],
)
def test_another_version_does_not_match(
    owner: object,
    name: str,
    value: object,
    open_here: OpenHere,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The files stay: the first version finds them again."""
    engine = open_here()
    asked(engine, SYSTEM)
    engine.close()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, value)
        other = open_here()
        assert asked(other, SYSTEM, kept=False).cached_tokens == 0
        other.close()
    assert asked(open_here(), SYSTEM).cached_tokens == len(SYSTEM) - 1


def test_reproducible_answers_have_the_same_bits(open_here: OpenHere) -> None:
    engine = open_here(reproducible=True)
    asked(engine, SYSTEM)
    longer = [*SYSTEM[:-20], 30, 31]
    again = asked(engine, longer, logprobs=5)
    assert again.cached_tokens == PREFILL_CHUNK
    state, fresh = engine.new_state(), engine.new_state()
    assert engine.prefixes is not None
    engine.prefixes.restore(state, engine.prefixes.find(longer))
    assert state.length == PREFILL_CHUNK
    rest = engine.extend(state, longer[PREFILL_CHUNK:])
    assert np.array_equal(rest, engine.extend(fresh, longer))


def test_a_fault_does_not_stop_the_writer(
    open_here: OpenHere, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that fails while its KV is restored has ended for the writer, too."""
    engine = open_here()
    scheduler = Scheduler(engine)
    answer(scheduler, SYSTEM)
    answer(scheduler, OTHER)
    written(engine, 4, folder)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "copy_in", Mock(side_effect=[None, RuntimeError("no memory")]))
        events: list[Event] = []
        scheduler.begin(
            Request(lambda _: [*SYSTEM, 17], SamplingOptions(), Limits(2), events.append)
        )
        assert isinstance(events[-1], Failed)
        patch.setattr(cache, "copied_out", Mock(side_effect=RuntimeError("no memory")))
        answer(scheduler, OTHER[::-1])
    assert answer(scheduler, OTHER[::-1]).cached_tokens == len(OTHER) - 1
    written(engine, 6, folder)
    assert answer(scheduler, SYSTEM).token_ids == asked(engine, SYSTEM).token_ids


def test_residency_does_not_choose(open_here: OpenHere) -> None:
    """With 30 % of the experts, a restored conversation continues with the same tokens."""
    tokens = []
    for memory in ("100%", "30%"):
        engine = open_here(memory=memory, prefix=PrefixBudget(64 << 20, disk_bytes=0))
        first = asked(engine, SYSTEM)
        again = asked(engine, [*SYSTEM, *first.token_ids[:-1], 20])
        assert again.cached_tokens == len(SYSTEM) + 5
        tokens.append((first.token_ids, again.token_ids))
    assert tokens[0] == tokens[1]


def test_what_is_not_to_be_kept(open_here: OpenHere, folder: Path) -> None:
    engine = open_here()
    asked(engine, SYSTEM, kept=False)
    assert asked(engine, OTHER, kept=False).cached_tokens == 0
    assert asked(engine, SYSTEM, kept=False).cached_tokens == 0
    engine.close()
    assert not folder.exists()
    untraced = open_here(trace=False)  # in RAM alone
    asked(untraced, SYSTEM)
    assert asked(untraced, SYSTEM).cached_tokens == len(SYSTEM) - 1
    untraced.close()
    assert not folder.exists()


def test_rm_removes_its_files(open_here: OpenHere, folder: Path, home: Path) -> None:
    engine = open_here()
    asked(engine, SYSTEM)
    engine.close()
    assert list(folder.glob("*.kv"))
    Library(Settings(home)).remove("demo:bf16")
    assert not folder.exists()


def test_the_budget_of_ram(open_here: OpenHere) -> None:
    """The text used least recently leaves, its last tokens first."""
    engine = open_here(prefix=PrefixBudget(1, disk_bytes=0))
    assert engine.prefixes is not None
    engine.prefixes.memory_bytes = 3 * PREFILL_CHUNK * engine.info.manifest.kv_bytes_per_token
    asked(engine, SYSTEM)
    asked(engine, OTHER)
    assert asked(engine, SYSTEM[:PREFILL_CHUNK]).cached_tokens == PREFILL_CHUNK - 1
    asked(engine, SYSTEM[::-1])
    assert engine.prefixes.bytes_used <= engine.prefixes.memory_bytes
    assert asked(engine, [*OTHER, 17]).cached_tokens < len(OTHER)


def test_the_budget_of_the_disk(open_here: OpenHere, folder: Path) -> None:
    engine = open_here()
    size = PREFILL_CHUNK * engine.info.manifest.kv_bytes_per_token + 8192
    engine.close()
    engine = open_here(prefix=PrefixBudget(64 << 20, disk_bytes=3 * size))
    for number in range(4):
        asked(engine, [16 + number, *SYSTEM[:PREFILL_CHUNK]])
    engine.close()
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 3 * size
    again = open_here(prefix=PrefixBudget(64 << 20, disk_bytes=3 * size))
    newest = [16 + 3, *SYSTEM[:PREFILL_CHUNK]]
    assert asked(again, newest).cached_tokens == PREFILL_CHUNK
    assert asked(again, [16, *SYSTEM[:PREFILL_CHUNK]]).cached_tokens == 0
