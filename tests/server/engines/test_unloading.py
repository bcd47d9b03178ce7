"""An engine that is unloaded while it works, or does not end: every request is told."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from moeinf.offload.store.expert_store import Stopped
from moeinf.runtime.config import EngineConfig, ServerSettings, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.events import Failed
from moeinf.runtime.library.processes import Registry
from moeinf.server.engines.jobs import Unloaded
from moeinf.server.engines.model_manager import ModelManager
from moeinf.server.engines.worker import Worker
from tests.server.engines.test_worker import Asked
from tests.server.engines.test_worker import worker as worker


def test_all_are_told_of_an_engine_that_does_not_end(worker: Worker) -> None:
    stuck, waiting = Asked(), Asked()
    worker.submit(stuck.job)
    assert stuck.begun.wait(20)
    worker.submit(waiting.job)
    try:
        assert not worker.close(0.1)
        for one in (stuck, waiting):
            event = one.heard.get(timeout=5)
            assert isinstance(event, Failed)
            assert isinstance(event.error, Unloaded)
    finally:
        stuck.may.set()
    assert worker.close(20)


def test_a_decode_pass_ends_with_its_engine(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the next layer, as a prefill does: an engine on a slow drive is not stuck."""
    decoding = threading.Event()

    def step(self: Engine, _steps: object) -> object:
        decoding.set()
        for _ in range(200):
            if self.store.stopped():
                raise Stopped
            time.sleep(0.05)
        raise AssertionError("the pass was not stopped")

    monkeypatch.setattr(Engine, "step", step)
    asked = Asked()
    asked.may.set()
    worker.submit(asked.job)
    assert decoding.wait(20)
    assert worker.close(5)
    event = asked.last()
    assert isinstance(event, Failed)
    assert isinstance(event.error, Unloaded)


def test_a_load_whose_request_is_cancelled_leaves_nothing(
    demo_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load cannot be stopped; its engine is closed as soon as it is there."""
    engines: list[Engine] = []
    began, may = threading.Event(), threading.Event()
    make = Engine.open

    def slow(*given: Any) -> Engine:
        began.set()
        assert may.wait(20)
        engines.append(make(*given))
        return engines[-1]

    async def serve() -> None:
        monkeypatch.setattr(Engine, "open", slow)
        host = ModelManager(Settings(demo_home), ServerSettings(), EngineConfig(trace=False))
        asking = asyncio.create_task(host.model("demo:bf16"))
        assert await asyncio.to_thread(began.wait, 20)
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        may.set()
        until = time.monotonic() + 20
        while Registry(Settings(demo_home).run).engines() or not engines:
            assert time.monotonic() < until
            await asyncio.sleep(0.05)
        assert host.loaded() == []

    asyncio.run(serve())
    left = weakref.ref(engines.pop())
    while any(thread.name == "engine" for thread in threading.enumerate()):
        time.sleep(0.01)
    assert left() is None
