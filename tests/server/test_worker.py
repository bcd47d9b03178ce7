"""Who waits for an engine's thread, who has left, and when a model may be unloaded."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from moeinf.offload.budget import DoesNotFit
from moeinf.runtime.asking import Limits, SamplingOptions
from moeinf.runtime.config import EngineConfig, ServerSettings, Settings
from moeinf.runtime.engine import Engine
from moeinf.runtime.library import Library
from moeinf.runtime.sizes import parse_memory
from moeinf.server import host as host_module
from moeinf.server.host import Host
from moeinf.server.jobs import Busy, Ended, Event, Job, Piece
from moeinf.server.worker import Worker

CONFIG = EngineConfig(memory=parse_memory("100%"), trace=False)


@dataclass
class Asked:
    """A job whose prompt is not made before it `may` be, and what was heard of it."""

    heard: queue.Queue[Event] = field(default_factory=queue.Queue)
    begun: threading.Event = field(default_factory=threading.Event)
    may: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.job = Job(self._prepare, SamplingOptions(temperature=0), Limits(8), self.heard.put)

    def _prepare(self, engine: Engine) -> list[int]:
        self.begun.set()
        assert self.may.wait(20)
        return engine.tokenizer.encode_text("17+25=")

    def last(self) -> Event:
        while isinstance(event := self.heard.get(timeout=20), Piece):
            pass
        return event


@pytest.fixture
def worker(demo_home: Path) -> Iterator[Worker]:
    settings = Settings(demo_home)
    manifest, folder = Library(settings).read("demo:bf16")
    found = Worker(lambda: Engine(manifest, folder, CONFIG, settings), parallel=1, max_queue=2)
    yield found
    found.close()


def test_a_job_whose_prompt_is_made_keeps_the_engine(worker: Worker) -> None:
    assert worker.idle
    asked = Asked()
    worker.submit(asked.job)
    assert asked.begun.wait(20)
    assert not worker.idle
    asked.may.set()
    last = asked.last()
    assert isinstance(last, Ended)
    assert last.reason == "stop"
    worker.submit(broken := Job(lambda _: [], SamplingOptions(), Limits(1), asked.heard.put))
    assert "no tokens" in str(asked.last())
    assert not broken.cancelled.is_set()
    assert worker.idle


def test_choices_and_notes_are_told(demo_home: Path) -> None:
    """The choices once, notes as they come; a listener that is gone ends nothing."""
    settings, said = Settings(demo_home), list[str]()

    def tell(line: str) -> None:
        said.append(line)
        raise BrokenPipeError

    async def serve() -> tuple[Event, Event]:
        host = Host(settings, ServerSettings(), CONFIG, tell)
        keeper = asyncio.create_task(host.run())
        engine = (loaded := await host.model("demo:bf16")).worker.engine
        assert engine is not None
        assert said == [f"demo:bf16: {choice}" for choice in engine.choices]
        assert said[0].startswith("demo:bf16: device: cpu (")
        ends = []
        for note in ("a test's", "another"):
            engine.notes.append(note)
            asked = Asked()
            asked.may.set()
            loaded.worker.submit(asked.job)
            ends.append(await asyncio.to_thread(asked.last))
            assert said.pop() == f"demo:bf16: {note}"
        assert len(said) == len(engine.choices)
        keeper.cancel()
        with suppress(asyncio.CancelledError):
            await keeper
        return ends[0], ends[1]

    assert all(isinstance(end, Ended) for end in asyncio.run(serve()))


def test_who_leaves_a_full_queue_hears_of_it(worker: Worker) -> None:
    first, left, stays, late = (Asked() for _ in range(4))
    worker.submit(first.job)
    assert first.begun.wait(20)
    worker.submit(left.job)
    worker.submit(stays.job)
    with pytest.raises(Busy):
        worker.submit(late.job)
    left.job.cancelled.set()
    worker.submit(late.job)
    last = left.last()  # at once: the engine's thread is busy with another
    assert isinstance(last, Ended)
    assert last.reason == "cancelled"
    for asked in (first, stays, late):
        asked.may.set()
    assert all(isinstance(asked.last(), Ended) for asked in (first, stays, late))


def test_a_model_stays_until_its_prompt_is_made(
    demo_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where it may not outlive its answer."""
    monkeypatch.setattr(host_module, "_LOOK_EVERY_S", 0.01)
    asked = Asked()

    async def serve() -> None:
        host = Host(Settings(demo_home), ServerSettings(keep_alive_s=60), CONFIG)
        keeper = asyncio.create_task(host.run())
        loaded = await host.model("demo:bf16")
        monkeypatch.setattr(host.library, "read", None)  # megabytes: not for what is loaded
        assert await host.model("demo:bf16") is loaded
        loaded.worker.submit(asked.job)
        loaded.keep_alive_s = 0
        await asyncio.sleep(0.3)
        assert host.loaded() == [loaded]
        asked.may.set()
        assert isinstance(await asyncio.to_thread(asked.last), Ended)
        for _ in range(200):
            if not host.loaded():
                break
            await asyncio.sleep(0.02)
        assert not host.loaded()
        keeper.cancel()

    asyncio.run(serve())


def test_a_model_is_loaded_when_the_last_one_has_gone(
    demo_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, its memory is not free."""
    asked, beside = Asked(), list[bool]()
    make = Engine.__init__

    async def serve() -> None:
        host = Host(Settings(demo_home), ServerSettings(), CONFIG)
        old = (await host.model("demo:bf16")).worker

        def watched(engine: Engine, *given: Any) -> None:
            beside.append(old._thread.is_alive())
            make(engine, *given)

        monkeypatch.setattr(Engine, "__init__", watched)
        old.submit(asked.job)
        assert await asyncio.to_thread(asked.begun.wait, 20)
        leaving = asyncio.create_task(host.unload("demo:bf16"))
        while host.loaded():
            await asyncio.sleep(0.01)
        coming = asyncio.create_task(host.model("demo:bf16"))
        await asyncio.sleep(0.2)
        asked.may.set()
        assert await leaving
        await coming
        assert beside == [False]
        assert await host.unload("demo:bf16")

    asyncio.run(serve())


def test_memory_is_made_by_unloading_what_is_idle_when_its_turn_comes(
    demo_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one is closed the others may go, or be asked."""
    refused = []

    @dataclass
    class Closes:
        idle: bool = True
        closed: bool = False

        def close(self) -> None:
            self.closed = True

    async def serve(config: EngineConfig) -> list[bool]:
        host = Host(Settings(demo_home), ServerSettings(), config)
        manifest, _ = host.library.read("demo:bf16")
        workers = [Closes() for _ in range(3)]
        names = [host_module.ModelName(name, "bf16") for name in ("a", "b", "c")]
        for name, worker in zip(names, workers, strict=True):
            host._loaded[name] = host_module.Loaded(manifest, worker, 60)  # type: ignore[arg-type]

        def close_first() -> None:
            workers[0].closed = True
            del host._loaded[names[1]]  # somebody has unloaded it
            workers[2].idle = False  # somebody asks it

        monkeypatch.setattr(workers[0], "close", close_first)
        with pytest.raises(DoesNotFit):
            await host._load(manifest.model)
        return [worker.closed for worker in workers]

    async def started(_: Host, key: object) -> None:
        refused.append(key)
        raise DoesNotFit(1, 2)

    monkeypatch.setattr(Host, "_started", started)
    assert asyncio.run(serve(EngineConfig())) == [True, False, False]
    assert len(refused) == 2
    assert asyncio.run(serve(CONFIG)) == [False, False, False]  # --memory is too little in any case
    assert len(refused) == 3
