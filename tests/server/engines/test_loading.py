"""A model that is being loaded: how much of it is read."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from moeinf.runtime.config import ServerSettings, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.server.engines.model_manager import ModelManager
from tests.server.engines.test_worker import CONFIG


def test_a_model_that_is_being_loaded(demo_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host tells how much of it is read, until it is loaded or has failed."""
    make, begun, may = Engine.open, threading.Event(), threading.Event()

    def waits(*given: Any) -> Engine:
        given[-1].total_bytes, given[-1].read_bytes = 100, 40
        begun.set()
        assert may.wait(20)
        return make(*given)

    async def serve() -> None:
        host = ModelManager(Settings(demo_home), ServerSettings(), CONFIG)
        monkeypatch.setattr(Engine, "open", waits)
        assert host.starting() == {}
        coming = asyncio.create_task(host.model("demo:bf16"))
        assert await asyncio.to_thread(begun.wait, 20)
        ((name, read),) = host.starting().items()
        assert (str(name), read.read_bytes, read.total_bytes) == ("demo:bf16", 40, 100)
        assert host.loaded() == []
        may.set()
        await coming
        assert host.starting() == {}
        assert await host.unload("demo:bf16")

    asyncio.run(serve())
