"""Engine.open: its steps, the state after a failed step, and the engine's parts."""

from __future__ import annotations

import gc
import sys
import weakref
from contextlib import suppress
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from moeinf.models.base import Model
from moeinf.native import OutOfDeviceMemory
from moeinf.offload.store.budget import DoesNotFit
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.engine.loader import load_model
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.processes import Registry
from moeinf.runtime.machine import gpu as gpus
from moeinf.runtime.placement.gpu_plan import CONTEXT_BYTES, workspace_bytes
from moeinf.runtime.sizes import parse_memory
from tests.conftest import Open
from tests.fake_device import FakeDevice
from tests.native.fake_cuda import Fake
from tests.watched import Watched

engine_module = sys.modules[Engine.__module__]
STEPS = ("plan_engine", "open_text", "open_tiers", "load_weights", "warm_up", "RequestTracing")


def open_demo(home: Path, **config: Any) -> Engine:
    manifest, folder = Library(Settings(home)).read("demo")
    return Engine.open(manifest, folder, EngineConfig(**config), Settings(home))


def held() -> tuple[int, int, int]:
    """Count threads, child processes, and descriptors except those of shards, which stay open."""
    gc.collect()
    tasks = list(Path("/proc/self/task").iterdir())
    children = sum(len((task / "children").read_text().split()) for task in tasks)
    links = [str(p.readlink()) for p in Path("/proc/self/fd").iterdir() if p.is_symlink()]
    return len(tasks), children, sum(not link.endswith(".safetensors") for link in links)


def failing(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a step of Engine.open fail after it has done its work."""
    real = getattr(engine_module, step)

    def fails(*given: Any) -> None:
        real(*given)
        raise OSError("a test's")

    monkeypatch.setattr(engine_module, step, fails)


@pytest.mark.linux("reads /proc")
@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_fails_closes_what_is_open(
    step: str, demo_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_demo(demo_home).close()  # starts threads that stay
    before = held()
    with monkeypatch.context() as patch:
        failing(step, patch)
        with pytest.raises(OSError, match="a test's"):
            open_demo(demo_home)
    assert all(now <= then for now, then in zip(held(), before, strict=True))
    assert Registry(Settings(demo_home).run).engines() == []
    with open_demo(demo_home) as engine:
        assert len(Registry(Settings(demo_home).run).engines()) == 1
        assert engine.take_notes() == []


@pytest.mark.linux("reads /proc")
def test_a_plan_that_fails_leaves_nothing(demo_home: Path) -> None:
    open_demo(demo_home).close()
    before = held()
    with pytest.raises(DoesNotFit):
        open_demo(demo_home, memory=parse_memory("393215"))
    assert all(now <= then for now, then in zip(held(), before, strict=True))
    assert Registry(Settings(demo_home).run).engines() == []


@pytest.mark.parametrize("step", ["", "load_weights", "warm_up"])
def test_weights_are_freed_before_their_gpu_is_given_back(
    step: str, fake: Fake, demo_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order is the same after a failed step and after close."""
    models, alive = list[weakref.ref[Model]](), list[bool]()

    class Device(FakeDevice):
        def release(self) -> None:
            alive.append(models[0]() is not None)
            super().release()

    def loaded(*given: Any) -> Model:
        model = load_model(*given)
        models.append(weakref.ref(model))
        return model

    device = Device(fake)
    fake.reset("mode=deferred,seed=21,memory=2000000000")
    monkeypatch.setattr(gpus, "missing_for_kernels", lambda: None)
    monkeypatch.setattr(gpus, "torch_device", lambda *_: device)
    monkeypatch.setattr("moeinf.runtime.engine.opening.load_model", loaded)
    manifest, _ = Library(Settings(demo_home)).read("demo")
    budget = CONTEXT_BYTES + workspace_bytes(manifest) + 1600 * manifest.slots.slot_bytes
    given: dict[str, Any] = {"device": "cuda", "miss": "fetch", "libcuda": fake.path}
    given["device_memory"] = parse_memory(str(budget))
    if step:
        failing(step, monkeypatch)
        with pytest.raises(OSError, match="a test's"):
            open_demo(demo_home, **given)
    else:
        engine = open_demo(demo_home, **given)
        assert engine.info.placement.on_device is not None
        assert engine.info.placement.on_device.inside
        assert alive == []
        engine.close()
    assert alive == [False]
    assert device.limits[-1] == 0
    assert fake.count("allocated") == fake.count("registered") == 0


def test_no_device_memory_for_the_dense_weights_is_said(
    fake: Fake, demo_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.reset("mode=deferred,seed=21,memory=2000000000")
    monkeypatch.setattr(gpus, "missing_for_kernels", lambda: None)
    monkeypatch.setattr(gpus, "torch_device", lambda *_: FakeDevice(fake))

    def none_left(*_: Any) -> Model:
        raise OutOfDeviceMemory("a test's")

    monkeypatch.setattr("moeinf.runtime.engine.opening.load_model", none_left)
    words = "no device memory is left for dense weights: a test's"
    with pytest.raises(OutOfDeviceMemory, match=words):
        open_demo(demo_home, device="cuda", miss="fetch", libcuda=fake.path)
    assert fake.count("allocated") == fake.count("registered") == 0


def test_an_engine_has_few_parts_and_frozen_facts(open_engine: Open) -> None:
    engine = open_engine(memory="30%", context=64)
    assert len(vars(engine)) <= 12, sorted(vars(engine))
    info = engine.info
    with pytest.raises(FrozenInstanceError):
        info.policy = "lru"  # type: ignore[misc]
    assert (str(info.name), info.family, info.format) == ("demo:bf16", "olmoe", "BF16")
    assert (info.context, info.slots, info.experts, info.slot_bytes) == (64, 57, 192, 49152)
    assert (info.policy, info.device, info.threads) == ("learned", "cpu", info.placement.threads)
    assert info.experts_bytes == 57 * 49152
    assert info.vocab_size == engine.model.vocab_size == engine.tokenizer.vocab_size
    assert not info.reads_sources
    assert info.digest == info.manifest.digest
    assert info.load_seconds > 0
    assert (info.folder / "manifest.json").is_file()


def test_passes_go_through_a_wrapper_only_within(open_engine: Open) -> None:
    engine = open_engine(context=64)
    layers = list[int]()

    class Counting(Watched):
        def submit(self, layer: int, *given: Any) -> Any:
            layers.append(layer)
            return super().submit(layer, *given)

    state = engine.new_state()
    with engine.routed_through(Counting):
        engine.extend(state, [1, 2])
        with suppress(KeyError), engine.routed_through(Counting):
            engine.extend(state, [3])
            raise KeyError
        engine.extend(state, [4])
    engine.extend(state, [5])
    once, twice = list(range(6)), [layer for layer in range(6) for _ in range(2)]
    assert layers == [*once, *twice, *once]
