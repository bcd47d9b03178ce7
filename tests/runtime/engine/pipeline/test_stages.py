"""Test stages that do not fit together, fail, hang or end, and what a hostile first one may ask."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moeinf.offload.store.expert_store import Stopped
from moeinf.offload.store.transfer import ExpertReadError
from moeinf.runtime.config import Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.engine.pipeline import links, stage
from moeinf.runtime.engine.pipeline.links import StageFailed, StageLost, StagesDiffer
from moeinf.runtime.engine.pipeline.messages import About, Begin, Pass, Reply, Rows, bytes_of
from moeinf.runtime.engine.pipeline.wire import Lost, Wire
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.library.library import Library
from tests.runtime.engine.pipeline.stages import Running, config, same, stages, used

LONG = [3 + (37 * place) % 90 for place in range(280)]


@pytest.fixture
def running(demo_home: Path) -> Iterator[Running]:
    """Yield a stage with the second half of the demo."""
    settings = Settings(demo_home)
    with stages(*Library(settings).read("demo"), settings, [3], 6, parallel=2) as (one,):
        yield one


def opened(home: Path, *addresses: str, model: str = "demo", **options: Any) -> Engine:
    settings = Settings(home, stage_key=options.pop("key", None))
    given = config(stages=addresses, **options)
    return Engine.open(*Library(settings).read(model), given, settings)


def works(home: Path, address: str) -> None:
    """Check that a new first stage gets the bits of one engine."""
    with opened(home) as whole, opened(home, address, parallel=2) as engine:
        assert same(used(engine, LONG), used(whole, LONG))


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
        for _ in range(12):
            time.sleep(0.1)
            assert not running.stage._engine.store.stopped()
        return computed(*given)

    monkeypatch.setattr(links, "SILENCE_S", 0.6)
    monkeypatch.setattr(stage, "_BUSY_S", 0.1)
    with opened(demo_home) as whole, opened(demo_home, running.address, parallel=2) as engine:
        monkeypatch.setattr(running.stage._engine, "compute_stage", slow)
        first = engine.extend(engine.new_state(), LONG)
        assert (first == whole.extend(whole.new_state(), LONG)).all()


def asking(running: Running, context: int = 64) -> tuple[Wire, About]:
    """Connect as a first stage that may ask anything."""
    host, port = running.address.split(":")
    wire = Wire(socket.create_connection((host, int(port))), 10)
    wire.prove(None, first=True)
    about = wire.receive(About)
    wire.send(Begin(context))
    return wire, about


@pytest.mark.parametrize(
    "rows",
    [
        [Rows(2, 0, 0, 1)],  # more states than it takes
        [Rows(0, 0, 1, 1)],  # after tokens that it does not have
        [Rows(0, 0, 1 << 40, 1)],
        [Rows(0, 0, 0, 65)],  # beyond the context
        [Rows(0, 0, 0, 8192), Rows(1, 0, 0, 8192)],  # beyond its window
        [Rows(0, 0, 0, 1), Rows(0, 0, 0, 1)],  # a state twice
    ],
)
def test_impossible_passes(rows: list[Rows], demo_home: Path, running: Running) -> None:
    wire, _ = asking(running)
    wire.send(Pass(1, tuple(rows), False))
    with pytest.raises(Lost, match=r"hung up|reset"):
        wire.receive(Reply)
    wire.close()
    assert "it asks for" in running.told[-1]
    works(demo_home, running.address)


def test_a_context_beyond_its_memory(running: Running) -> None:
    wire, about = asking(running, context=1 << 40)
    with pytest.raises(Lost, match=r"hung up|reset"):
        wire.receive(Reply)
    wire.close()
    assert f"more than {about.context}" in running.told[-1]


def test_states_of_any_bytes(demo_home: Path, running: Running) -> None:
    """Numbers are only computed with: NaN goes in and out."""
    wire, _ = asking(running)
    width = running.stage.part.hidden_width
    x = torch.full((2, width), float("nan"), dtype=torch.bfloat16)
    wire.send(Pass(1, (Rows(0, 0, 0, 2),), False), bytes_of(x))
    reply = wire.receive(Reply)
    assert reply.number == 1
    wire.close()
    works(demo_home, running.address)
