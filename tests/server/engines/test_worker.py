"""The queue of an engine's thread: waiting requests, those that left, and unloading."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from moeinf.offload.store.budget import DoesNotFit
from moeinf.runtime.config import EngineConfig, ServerSettings, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.events import Ended, Event, Failed, Piece
from moeinf.runtime.library.library import Library
from moeinf.runtime.requests import Limits, SamplingOptions
from moeinf.runtime.sizes import parse_memory
from moeinf.runtime.text.panic import Panic
from moeinf.server.engines import model_manager as host_module
from moeinf.server.engines.jobs import Busy, Job, Unloaded
from moeinf.server.engines.model_manager import ModelManager
from moeinf.server.engines.worker import Worker

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
        return engine.tokenizer.encode_text("<|user|>17+25=<|assistant|>")

    def last(self) -> Event:
        while isinstance(event := self.heard.get(timeout=20), Piece):
            pass
        return event


@pytest.fixture
def worker(demo_home: Path) -> Iterator[Worker]:
    settings = Settings(demo_home)
    manifest, folder = Library(settings).read("demo:bf16")
    found = Worker(lambda: Engine.open(manifest, folder, CONFIG, settings), parallel=1, max_queue=2)
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
        host = ModelManager(settings, ServerSettings(), CONFIG, tell)
        keeper = asyncio.create_task(host.run())
        engine = (loaded := await host.model("demo:bf16")).worker.engine
        assert engine is not None
        assert said == [f"demo:bf16: {choice}" for choice in engine.info.choices]
        assert said[0].startswith("demo:bf16: device: cpu (")
        ends = []
        for note in ("a test's", "another"):
            engine.notes.append(note)
            asked = Asked()
            asked.may.set()
            loaded.worker.submit(asked.job)
            ends.append(await asyncio.to_thread(asked.last))
            assert said.pop() == f"demo:bf16: {note}"
        assert len(said) == len(engine.info.choices)
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
        host = ModelManager(Settings(demo_home), ServerSettings(keep_alive_s=60), CONFIG)
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
    make = Engine.open

    async def serve() -> None:
        host = ModelManager(Settings(demo_home), ServerSettings(), CONFIG)
        old = (await host.model("demo:bf16")).worker

        def watched(*given: Any) -> Engine:
            beside.append(old._thread.is_alive())
            return make(*given)

        monkeypatch.setattr(Engine, "open", watched)
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

        def close(self) -> bool:
            self.closed = True
            return True

    async def serve(config: EngineConfig) -> list[bool]:
        host = ModelManager(Settings(demo_home), ServerSettings(), config)
        manifest, _ = host.library.read("demo:bf16")
        workers = [Closes() for _ in range(3)]
        names = [host_module.ModelName(name, "bf16") for name in ("a", "b", "c")]
        for name, worker in zip(names, workers, strict=True):
            host._loaded[name] = host_module.Loaded(manifest, worker, 60)  # type: ignore[arg-type]

        def close_first() -> bool:
            workers[0].closed = True
            del host._loaded[names[1]]  # another request has unloaded it
            workers[2].idle = False  # a request has arrived
            return True

        monkeypatch.setattr(workers[0], "close", close_first)
        with pytest.raises(DoesNotFit):
            await host._load(manifest.model, None)
        return [worker.closed for worker in workers]

    async def started(_: ModelManager, key: object, __: int | None) -> None:
        refused.append(key)
        raise DoesNotFit(1, 2)

    monkeypatch.setattr(ModelManager, "_started", started)
    assert asyncio.run(serve(EngineConfig())) == [True, False, False]
    assert len(refused) == 2
    assert asyncio.run(serve(CONFIG)) == [False, False, False]  # --memory is too little in any case
    assert len(refused) == 3


class PanicException(BaseException):
    """The exception of pyo3 when Rust panics: it passes `except Exception`."""


def test_a_panic_costs_the_request_that_it_hits(worker: Worker) -> None:
    def panic(engine: Engine) -> list[int]:
        raise PanicException("index out of range")

    for _ in range(2):
        panics = Asked()
        panics.job.prepare = panic
        worker.submit(panics.job)
        last = panics.last()
        assert isinstance(last, Failed)
        assert isinstance(last.error, Panic)
        asked = Asked()
        asked.may.set()
        worker.submit(asked.job)
        assert isinstance(asked.last(), Ended)
    assert worker.failure is None
    assert worker.idle


def test_whatever_ends_the_thread_fails_all_its_requests(
    demo_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next request loads the model again."""
    may = threading.Event()
    extend = Engine.extend_all

    def panic(self: Engine, *given: Any) -> Any:
        assert may.wait(20)
        raise PanicException("unwrap on None")

    async def serve() -> None:
        host = ModelManager(Settings(demo_home), ServerSettings(parallel=1), CONFIG)
        loaded = await host.model("demo:bf16")
        monkeypatch.setattr(Engine, "extend_all", panic)
        waiting = [Asked() for _ in range(3)]
        for asked in waiting:
            asked.may.set()
            loaded.worker.submit(asked.job)
        may.set()
        for asked in waiting:
            last = await asyncio.to_thread(asked.last)
            assert isinstance(last, Failed)
            assert isinstance(last.error, Panic)
        assert isinstance(loaded.worker.failure, Panic)
        assert host.loaded() == []
        with pytest.raises(Unloaded):
            loaded.worker.submit(Asked().job)
        monkeypatch.setattr(Engine, "extend_all", extend)
        again = await host.model("demo:bf16")
        assert again is not loaded
        asked = Asked()
        asked.may.set()
        again.worker.submit(asked.job)
        assert isinstance(await asyncio.to_thread(asked.last), Ended)
        assert await host.unload("demo:bf16")

    asyncio.run(serve())


def test_an_engine_that_does_not_end_is_not_waited_for(
    demo_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, said = Worker.close, list[str]()
    monkeypatch.setattr(Worker, "close", lambda self, seconds=0.2: close(self, min(seconds, 0.2)))

    async def serve() -> None:
        host = ModelManager(Settings(demo_home), ServerSettings(), CONFIG, said.append)
        keeper = asyncio.create_task(host.run())
        asked, other = Asked(), Asked()
        first = (await host.model("demo:bf16")).worker
        first.submit(asked.job)
        assert await asyncio.to_thread(asked.begun.wait, 20)
        said.clear()
        with pytest.raises(Unloaded, match="restart"):
            await host.unload("demo:bf16")
        assert host.stuck
        assert len(said) == 1
        second = (await host.model("demo:bf16")).worker  # others are not held up
        second.submit(other.job)
        assert await asyncio.to_thread(other.begun.wait, 20)
        keeper.cancel()
        with suppress(asyncio.CancelledError):
            await keeper
        assert host.stuck
        for one, worker in ((asked, first), (other, second)):
            one.may.set()
            assert isinstance(await asyncio.to_thread(one.last), Failed)
            assert close(worker, 20)
        assert not host.stuck

    asyncio.run(serve())


@dataclass
class Slow:
    """A constraint whose grammar is compiled, and whose masks are made, when they `may`."""

    compiled: threading.Event = field(default_factory=threading.Event)
    masked: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)
    closed: bool = False

    def ready(self, seconds: float = 0.0) -> bool:
        return self.compiled.is_set() and (not self.begun.is_set() or self.masked.wait(seconds))

    def mask(self, logits: Any) -> Any:
        return logits

    def took(self, token: int) -> None:
        self.begun.set()

    def close(self) -> None:
        self.closed = True


def test_others_go_on_while_a_grammar_is_slow(demo_home: Path) -> None:
    settings = Settings(demo_home)
    manifest, folder = Library(settings).read("demo:bf16")
    config = replace(CONFIG, parallel=2)
    worker = Worker(
        lambda: Engine.open(manifest, folder, config, settings), parallel=2, max_queue=20
    )
    slow = [Slow() for _ in range(5)]
    held = [Asked() for _ in slow]
    for asked, constraint in zip(held, slow, strict=True):
        asked.may.set()
        asked.job.constrain = lambda *_, constraint=constraint: constraint  # type: ignore[misc]
        worker.submit(asked.job)

    def another_is_answered() -> None:
        asked = Asked()
        asked.may.set()
        worker.submit(asked.job)
        assert isinstance(asked.last(), Ended)

    another_is_answered()  # nothing is compiled, and no place is taken
    assert worker.running == 0
    assert not worker.idle
    slow[0].compiled.set()
    assert slow[0].begun.wait(20)
    another_is_answered()  # the first mask is made, the second is not
    assert worker.running == 1
    held[1].job.cancelled.set()
    last = held[1].last()
    assert isinstance(last, Ended)
    assert last.reason == "cancelled"
    for constraint in slow:
        constraint.compiled.set()
        constraint.masked.set()
    assert all(isinstance(held[n].last(), Ended) for n in (0, 2, 3, 4))
    worker.submit((last_one := Asked()).job)
    last_one.job.constrain = lambda *_: Slow()
    last_one.may.set()
    assert worker.close()
    assert isinstance(last_one.last(), Failed)
    assert all(constraint.closed for constraint in slow)
