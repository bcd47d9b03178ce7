"""A server whose GPU fails, or runs out of memory permanently, on the fake libcuda."""

from __future__ import annotations

import asyncio
import base64
import queue
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from moeinf.native import DeviceError
from moeinf.runtime.config import EngineConfig, ServerSettings, Settings
from moeinf.runtime.generation.events import Ended, Event, Failed, Piece
from moeinf.runtime.machine import gpu as gpus
from moeinf.runtime.machine.device_choice import DeviceUnavailable
from moeinf.runtime.requests import Limits, SamplingOptions
from moeinf.runtime.sizes import parse_memory
from moeinf.server.api.answers import words_of
from moeinf.server.api.ollama_api import _living
from moeinf.server.engines.expert_map import GPU, USED, ExpertMap
from moeinf.server.engines.jobs import Job
from moeinf.server.engines.model_manager import Loaded, ModelManager
from tests.fake_device import FakeDevice
from tests.native.fake_cuda import Fake


@pytest.fixture
def devices(fake: Fake, monkeypatch: pytest.MonkeyPatch, new_to_gpus: None) -> list[FakeDevice]:
    """Return the engines' devices, in the order in which they were opened."""
    fake.reset("mode=deferred,seed=5,memory=2000000000")
    found: list[FakeDevice] = []

    def open_one(_: object) -> FakeDevice:
        found.append(FakeDevice(fake))
        return found[-1]

    monkeypatch.setattr(gpus, "missing_for_kernels", lambda: None)
    monkeypatch.setattr(gpus, "torch_device", open_one)
    return found


def with_host(
    fake: Fake, home: Path, memory: str, test: Callable[[ModelManager], Awaitable[None]]
) -> None:
    config = EngineConfig(
        memory=parse_memory("100%"), trace=False, device="cuda",
        device_memory=parse_memory(memory), miss="fetch", libcuda=fake.path,
    )  # fmt: skip

    async def serve() -> None:
        host = ModelManager(Settings(home), ServerSettings(), config)
        keeper = asyncio.create_task(host.run())
        try:
            await test(host)
        finally:
            keeper.cancel()
            with suppress(asyncio.CancelledError):
                await keeper

    asyncio.run(serve())


async def last(loaded: Loaded) -> Event:
    """Return the last event of an answer."""
    heard: queue.Queue[Event] = queue.Queue()
    greedy = SamplingOptions(temperature=0)
    loaded.worker.submit(
        Job(
            lambda e: e.tokenizer.encode_text("<|user|>17+25=<|assistant|>"),
            greedy,
            Limits(8),
            heard.put,
        )
    )
    while isinstance(event := await asyncio.to_thread(heard.get, timeout=20), Piece):
        pass
    return event


async def ended(loaded: Loaded) -> None:
    for _ in range(500):
        if loaded.worker.failure is not None:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the worker goes on")


def test_a_fault_ends_the_engine(fake: Fake, devices: list[FakeDevice], demo_home: Path) -> None:
    """No pass will succeed: its memory is given back, and every client is told what helps."""

    async def test(host: ModelManager) -> None:
        loaded = await host.model("demo:bf16")
        assert isinstance(await last(loaded), Ended)
        assert host.loaded() == [loaded]
        engine = loaded.worker.engine
        assert engine is not None
        plan, about = engine.info.placement, _living(loaded)
        assert plan.on_device is not None
        assert about["size_vram"] == plan.on_device.peak_bytes > 0
        assert about["size"] == plan.peak_bytes + about["size_vram"]
        fake.configure("fail=cuMemcpyHtoDAsync:0:700:1")
        engine.store.device.shrink()
        failed = await last(loaded)
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, DeviceError)
        assert "restart `moeinf serve`" in words_of(failed.error)
        await ended(loaded)
        assert loaded.worker.engine is None
        assert host.loaded() == []
        with pytest.raises(DeviceUnavailable) as caught:
            await host.model("demo:bf16")
        assert caught.value.http_status == 503
        assert "restart `moeinf serve`" in words_of(caught.value)

    with_host(fake, demo_home, "664MiB", test)


def test_experts_on_the_gpu_are_shown(
    fake: Fake, devices: list[FakeDevice], demo_home: Path
) -> None:
    async def test(host: ModelManager) -> None:
        loaded = await host.model("demo:bf16")
        engine = loaded.worker.engine
        assert engine is not None
        watched = ExpertMap(loaded.worker, engine)
        assert isinstance(await last(loaded), Ended)
        frame = watched.frame()
        cells = np.frombuffer(base64.b64decode(frame["map"]), np.uint8)
        upper = engine.store.device
        assert upper is not None
        assert np.flatnonzero(cells & 3 == GPU).tolist() == upper.table.present() != []
        assert frame["tiers"]["gpu"]["experts"] == upper.count
        assert frame["bus_bytes_per_s"] > 0
        assert (cells & USED).any()

    with_host(fake, demo_home, "664MiB", test)


def test_an_engine_without_a_slot_is_loaded_anew(
    fake: Fake, devices: list[FakeDevice], demo_home: Path
) -> None:
    """Others took the memory that was given up for a moment, and have gone since."""

    async def test(host: ModelManager) -> None:
        loaded = await host.model("demo:bf16")
        devices[-1].no_memory = 1
        fake.configure("fail=cuMemAlloc:0:2:9")
        assert isinstance(await last(loaded), Failed)
        await ended(loaded)
        fake.configure("mend")
        again = await host.model("demo:bf16")
        assert again is not loaded
        assert isinstance(await last(again), Ended)

    with_host(fake, demo_home, "642MiB", test)
