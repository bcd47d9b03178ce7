"""Test stages that do not fit together, fail, hang or end, and passes that are interrupted."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from moeinf.offload.store.expert_store import Stopped
from moeinf.offload.store.transfer import ExpertReadError
from moeinf.runtime.config import Settings
from moeinf.runtime.engine.pipeline import links, stage
from moeinf.runtime.engine.pipeline.links import StageFailed, StageLost, StagesDiffer
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.library.library import Library
from tests.runtime.engine.pipeline.stages import LONG, Running, opened, same, stages, used, works


@pytest.mark.parametrize(
    ("cuts", "stop", "words"),
    [
        ([2, 3], 5, "no stage has the layers 5-5"),
        ([0], 6, "has layer 0, which belongs here"),
    ],
)
def test_layers_that_are_missing(cuts: list[int], stop: int, words: str, demo_home: Path) -> None:
    settings = Settings(demo_home)
    given = (*Library(settings).read("demo"), settings, cuts, stop)
    with stages(*given) as found, pytest.raises(StagesDiffer, match=words):
        opened(demo_home, *(one.address for one in found))


def test_gap_and_overlap(demo_home: Path) -> None:
    settings = Settings(demo_home)
    given = (*Library(settings).read("demo"), settings)
    with stages(*given, [4], 6) as (last,):
        for stop, words in ((3, "no stage has the layers 3-3"), (5, "two stages .* 4-4")):
            with (
                stages(*given, [2], stop) as (middle,),
                pytest.raises(StagesDiffer, match=words),
            ):
                opened(demo_home, last.address, middle.address)


def test_stages_of_another_kind(
    demo_home: Path, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, words in (
        ({"model": "demo:f32"}, "has demo:bf16, not demo:f32"),
        ({"kv": "q8"}, "has --kv full, not q8"),
        ({"parallel": 3}, "takes 2 requests together, not 3"),
    ):
        with pytest.raises(StagesDiffer, match=words):
            opened(demo_home, running.address, **options)  # type: ignore[arg-type]
    monkeypatch.setattr(links, "version", lambda: "9.9")
    with pytest.raises(StagesDiffer, match=r"not 9\.9"):
        opened(demo_home, running.address)
    monkeypatch.undo()
    for options, words in (
        ({"skip_below": 0.1}, "--skip-below"),
        ({"device": "cuda"}, "--device cuda"),
    ):
        with pytest.raises(InvalidValue, match=words):
            opened(demo_home, running.address, **options)  # type: ignore[arg-type]
    works(demo_home, running.address)


def test_the_least_context_counts(demo_home: Path) -> None:
    settings = Settings(demo_home)
    with stages(*Library(settings).read("demo"), settings, [3], 6, context=64) as (one,):
        with pytest.raises(StagesDiffer, match="has --ctx 64, less than 65"):
            opened(demo_home, one.address, context=65)
        with opened(demo_home, one.address) as engine:
            assert (engine.info.context, engine.new_state().capacity) == (64, 64)
            assert "layers 0-2 here, 3-5 at 127.0.0.1" in engine.take_notes()[0]


def test_another_key(demo_home: Path, running: Running) -> None:
    with pytest.raises(StageLost, match="MOEINF_STAGE_KEY"):
        opened(demo_home, running.address, key="wrong")
    until = time.monotonic() + 10  # the stage tells it in a thread
    while not running.told and time.monotonic() < until:
        time.sleep(0.01)
    assert "another MOEINF_STAGE_KEY" in running.told[-1]
    works(demo_home, running.address)


def test_nothing_listens(demo_home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        address = f"127.0.0.1:{door.getsockname()[1]}"
    with pytest.raises(StageLost, match="cannot be reached"):
        opened(demo_home, address)


def test_a_failed_pass_changes_nothing(
    demo_home: Path, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ExpertReadError("experts/3/1", "the drive \x1b[2Jfails", "demo:bf16")

    with opened(demo_home) as whole, opened(demo_home, running.address, parallel=2) as engine:
        state = engine.new_state()
        monkeypatch.setattr(running.stage._engine, "compute_stage", fail)
        with pytest.raises(StageFailed, match=r"experts/3/1 cannot be read: the drive \\x1b\[2J"):
            engine.extend(state, LONG)
        monkeypatch.undo()
        assert (state.length, engine.lost) == (0, False)
        del state
        assert same(used(engine, LONG), used(whole, LONG))


def test_a_stopped_pass(demo_home: Path, running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    computed, asked = running.stage._engine.compute_stage, threading.Event()

    def slow(*given: Any) -> Any:
        while not running.stage._engine.store.stopped():
            asked.set()
            time.sleep(0.01)
        return computed(*given)

    with opened(demo_home) as whole, opened(demo_home, running.address, parallel=2) as engine:
        monkeypatch.setattr(running.stage._engine, "compute_stage", slow)
        state = engine.new_state()
        with pytest.raises(Stopped), engine.stoppable(asked.is_set):
            engine.extend(state, LONG)
        monkeypatch.undo()
        assert (state.length, engine.lost) == (0, False)
        del state
        assert same(used(engine, LONG), used(whole, LONG))


def test_a_stage_that_hangs(
    demo_home: Path, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, computed = threading.Event(), running.stage._engine.compute_stage

    def hang(*given: Any) -> Any:
        hangs.wait(20)
        return computed(*given)

    monkeypatch.setattr(links, "SILENCE_S", 0.5)
    with opened(demo_home, running.address, parallel=2) as engine:
        state = engine.new_state()
        engine.extend(state, LONG)
        monkeypatch.setattr(running.stage._engine, "compute_stage", hang)
        begin = time.monotonic()
        with pytest.raises(StageLost, match=r"nothing has come from it for 0\.5 s"):
            engine.extend(state, [5])
        assert time.monotonic() - begin < 5
        assert engine.lost
        with pytest.raises(StageLost, match="is lost"):  # and every later pass
            engine.extend(engine.new_state(), [5])
    hangs.set()
    monkeypatch.undo()
    works(demo_home, running.address)


def test_a_long_pass_does_not_hang(
    demo_home: Path, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer tells the first stage that it works."""
    computed = running.stage._engine.compute_stage

    def slow(*given: Any) -> Any:
        for _ in range(30):  # longer than the patience for two chunks
            time.sleep(0.1)
            assert not running.stage._engine.store.stopped()
        return computed(*given)

    monkeypatch.setattr(links, "SILENCE_S", 0.6)
    monkeypatch.setattr(stage, "_BUSY_S", 0.1)
    with opened(demo_home) as whole, opened(demo_home, running.address, parallel=2) as engine:
        monkeypatch.setattr(running.stage._engine, "compute_stage", slow)
        first = engine.extend(engine.new_state(), LONG)
        assert (first == whole.extend(whole.new_state(), LONG)).all()


def test_a_layer_of_a_long_prompt_may_take_longer(
    demo_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage tells of each layer, so a silence is allowed for each chunk of a pass."""

    def slow(*given: Any) -> Any:
        time.sleep(1.4)
        return computed(*given)

    monkeypatch.setattr(links, "SILENCE_S", 1.0)
    about = (*Library(Settings(demo_home)).read("demo"), Settings(demo_home))
    options: dict[str, Any] = {"memory": "50%", "window": 512}
    with (
        stages(*about, [3], 6, **options) as (running,),
        opened(demo_home, running.address, **options) as engine,
    ):
        assert engine.window == 512
        computed = running.stage._engine.compute_stage
        monkeypatch.setattr(running.stage._engine, "compute_stage", slow)
        state = engine.new_state()
        engine.extend(state, LONG)  # two chunks in one pass
        with pytest.raises(StageLost, match="nothing has come from it for 1 s"):
            engine.extend(state, [5])


def test_an_interrupted_pass_ends_the_connection(
    demo_home: Path, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second Ctrl-C raises anywhere. The late answer must not come into another pass."""

    def interrupt() -> bool:
        raise KeyboardInterrupt

    computed, goes_on = running.stage._engine.compute_stage, threading.Event()

    def slow(*given: Any) -> Any:
        goes_on.wait(20)
        return computed(*given)

    with opened(demo_home, running.address, parallel=2) as engine:
        state = engine.new_state()
        engine.extend(state, [5, 6])
        monkeypatch.setattr(running.stage._engine, "compute_stage", slow)
        monkeypatch.setattr(engine.store, "stopped", interrupt, raising=True)
        monkeypatch.setattr(engine.store, "_start", lambda: None)  # its own layers go on
        with pytest.raises(KeyboardInterrupt):
            engine.extend(state, [7])
        goes_on.set()
        monkeypatch.undo()
        assert engine.lost
        with pytest.raises(StageLost, match="a pass was interrupted"):
            engine.extend(state, [7])
        assert state.length == 2
    works(demo_home, running.address)


def test_another_arithmetic_is_told(
    demo_home: Path, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(demo_home, running.address) as engine:
        assert not any("computes with" in note for note in engine.take_notes())
    monkeypatch.setattr(links, "arithmetic", lambda: "other kernels")
    with opened(demo_home, running.address) as engine:
        (note,) = [note for note in engine.take_notes() if "computes with" in note]
    assert note.startswith(f"the stage at {running.address}")
    assert "not other kernels" in note


def test_a_state_that_has_no_memory(
    demo_home: Path, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass fails, and the stage goes on."""

    def full(_: int) -> None:
        raise MemoryError("no memory is left")

    with opened(demo_home) as whole, opened(demo_home, running.address, parallel=2) as engine:
        monkeypatch.setattr(running.stage._engine.model, "new_state", full)
        with pytest.raises(StageFailed, match="no memory is left"):
            engine.extend(engine.new_state(), LONG)
        monkeypatch.undo()
        assert not engine.lost
        assert same(used(engine, LONG), used(whole, LONG))


def test_more_states_than_requests(demo_home: Path, running: Running) -> None:
    with opened(demo_home, running.address) as engine:
        one, other = engine.new_state(), engine.new_state()
        engine.extend(one, [5])
        with pytest.raises(AssertionError, match="parallel"):
            engine.extend(other, [5])
        del one
        engine.extend(other, [5])
        assert not engine.lost
