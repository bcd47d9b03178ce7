"""Engines on the fake libcuda: tokens, memory limits and failures of the device tier.

No GPU is needed: CPU kernels run when the fake's streams reach them, in any allowed order.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from moeinf.native import DeviceError, OutOfDeviceMemory
from moeinf.offload.gpu_tier.miss_split import MISSES, Miss
from moeinf.offload.policy.table import POLICIES
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.library.library import Library
from moeinf.runtime.machine import gpu as gpus
from moeinf.runtime.machine.device_choice import DeviceUnavailable
from moeinf.runtime.machine.measurements import remembered_contended
from moeinf.runtime.placement.gpu_plan import CONTEXT_BYTES, DeviceDoesNotFit, workspace_bytes
from moeinf.runtime.sizes import MemorySize, parse_memory
from tests.conftest import Open, forget_gpus
from tests.fake_device import FakeDevice
from tests.native.fake_cuda import Fake
from tests.runtime.engine.test_engine import GREEDY, PROMPTS, SAMPLED, tokens

SLOT = 49152  # of the demo's experts in bf16; the unit of the device memory below


@pytest.fixture
def open_gpu_engine(
    fake: Fake, demo_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Open]:
    """Return a function that opens an engine with a fake GPU and closes it after the test.

    Example: open_gpu_engine(slots=9, miss="fetch").
    """
    fake.reset("mode=deferred,seed=21,memory=2000000000")
    monkeypatch.setattr(gpus, "missing_for_kernels", lambda: None)
    monkeypatch.setattr(gpus, "torch_device", lambda *_: FakeDevice(fake))
    home = tmp_path / "home"
    home.mkdir()
    (home / "models").symlink_to(demo_home / "models")
    engines: list[Engine] = []

    def open_one(
        slots: int | None = None, miss: Miss = "fetch", policy: str = "adaptive",
        memory: str = "100%", model: str = "demo", extra: int = 0,
    ) -> Engine:  # fmt: skip
        settings = Settings(home)
        manifest, folder = Library(settings).read(model)
        budget = None
        if slots is not None:
            fixed = CONTEXT_BYTES + workspace_bytes(manifest)
            budget = parse_memory(str(fixed + slots * manifest.slots.slot_bytes + extra))
        config = EngineConfig(
            memory=parse_memory(memory), policy=policy, device="cuda", device_memory=budget,
            miss=miss, libcuda=fake.path,
        )  # fmt: skip
        engines.append(Engine.open(manifest, folder, config, settings))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.close()
    assert fake.count("allocated") == fake.count("registered") == 0


def answered(engine: Engine) -> list[list[int]]:
    asked = zip(PROMPTS[:3], (SAMPLED, GREEDY, GREEDY), strict=True)
    return [tokens(engine, prompt, options) for prompt, options in asked]


@pytest.fixture(scope="module")
def of_the_cpu(demo_home: Path) -> list[list[int]]:
    settings = Settings(demo_home)
    manifest, folder = Library(settings).read("demo")
    config = EngineConfig(memory=parse_memory("100%"))
    with Engine.open(manifest, folder, config, settings) as engine:
        return answered(engine)


@pytest.mark.matrix
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_fetch_gives_the_cpus_tokens(
    policy: str, of_the_cpu: list[list[int]], open_gpu_engine: Open
) -> None:
    for slots, memory in ((4, "393216"), (60, "30%"), (None, "100%")):
        gpu = open_gpu_engine(slots, policy=policy, memory=memory)
        assert answered(gpu) == of_the_cpu
        assert gpu.store.idle
        assert gpu.store.stats.decode_cpu_events == 0
        assert gpu.store.stats.decode_events > 0
    assert gpu.store.stats.bus_bytes <= 192 * SLOT  # all fit: each was copied at most once


@pytest.mark.matrix
@pytest.mark.parametrize("miss", ["compute", "auto"])
@pytest.mark.parametrize("model", ["demo", "demo:f32"])
def test_shared_steps_agree(
    miss: Miss, model: str, open_engine: Open, open_gpu_engine: Open
) -> None:
    """The fake computes like the CPU, so the choice of the processor does not change a bit."""
    expected = [tokens(open_engine(model), prompt) for prompt in PROMPTS]
    gpu = open_gpu_engine(30, miss, memory="30%", model=model)
    assert [tokens(gpu, prompt) for prompt in PROMPTS] == expected
    stats = gpu.store.stats
    assert stats.decode_device_hits > 0
    assert stats.decode_cpu_events > 0 or miss == "auto"  # auto decides by the measured speeds
    assert stats.decode_bus_bytes > 0  # promotions


def of_the_demo(engine: Engine) -> str:
    return f"BF16, {SLOT} bytes, {engine.info.threads} threads"


def test_bandwidths_are_measured_once(open_gpu_engine: Open) -> None:
    engine = open_gpu_engine(8, "auto")
    (line,) = [line for line in engine.info.choices if line.startswith("misses:")]
    assert "each layer fetches some and the CPU computes the others" in line
    home = Settings(engine.info.folder.parents[2])
    speeds = remembered_contended(home, "Fake GPU", of_the_demo(engine))
    assert speeds is not None
    assert 0 < speeds.fetched_share < 1
    again = open_gpu_engine(8, "auto")
    assert line in again.info.choices  # the same figures


def test_device_memory_is_a_promise(fake: Fake, open_gpu_engine: Open) -> None:
    for slots in (4, 5, 1466):
        engine = open_gpu_engine(slots, extra=SLOT - 1)
        plan = engine.info.placement.on_device
        assert plan is not None
        assert plan.inside == (slots == 1466)  # then dense weights and KV cache fit
        assert plan.inside or plan.slots == slots
        assert plan.arena_bytes == fake.count("allocated")
        assert plan.peak_bytes <= plan.budget_bytes < plan.peak_bytes + SLOT
        assert any(f"{plan.slots} experts, workspace" in line for line in engine.info.choices)
        engine.close()


def test_what_others_hold_is_not_promised(fake: Fake, open_gpu_engine: Open) -> None:
    """100 slots are requested; the device has room for 50."""
    manifest = open_gpu_engine(4).info.manifest
    free = workspace_bytes(manifest) + 50 * SLOT + SLOT // 2
    others = 2_000_000_000 - free - (8 << 20) - fake.count("allocated")
    fake.configure(f"others={others}")
    plan = open_gpu_engine(100).info.placement.on_device
    assert plan is not None
    assert plan.slots == 50


def test_a_budget_is_no_more_than_there_is(fake: Fake, open_gpu_engine: Open) -> None:
    """A request beyond the free memory adds no room."""
    total = CONTEXT_BYTES + workspace_bytes(open_gpu_engine(4).info.manifest) + 50 * SLOT
    fake.configure(f"memory={total}")
    engine = open_gpu_engine(100_000)
    plan = engine.info.placement.on_device
    assert plan is not None
    assert plan.peak_bytes <= plan.budget_bytes <= total
    assert any("what Fake GPU has free, of 5." in line for line in engine.info.choices)


def test_no_memory_for_the_arena_is_said_in_words(fake: Fake, open_gpu_engine: Open) -> None:
    """Other processes have taken the memory since the plan was made."""
    fake.configure("fail=cuMemAlloc:0:2:-1")
    with pytest.raises(OutOfDeviceMemory, match="no device memory is left for experts: cuMem"):
        open_gpu_engine(9)


def test_too_little_device_memory_names_the_least(open_gpu_engine: Open) -> None:
    with pytest.raises(DeviceDoesNotFit, match="of device memory is too little") as caught:
        open_gpu_engine(3)
    assert caught.value.min_bytes == caught.value.given_bytes + SLOT


def test_page_locking_that_fails_says_why(fake: Fake, open_gpu_engine: Open) -> None:
    fake.configure("fail=cuMemHostRegister:0:2:1")
    engine = open_gpu_engine(8)
    assert len(tokens(engine, "17+25=")) == 3
    (note,) = [note for note in engine.take_notes() if "page-locked" in note]
    assert note.startswith("0 of 192 host slots are page-locked")
    assert "cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY" in note
    assert engine.take_notes() == []


def test_a_bus_is_measured_without_page_locking_and_never_without_copies(
    fake: Fake, open_gpu_engine: Open, tmp_path: Path
) -> None:
    """A system may refuse to page-lock; a copy that fails during CPU work is reported."""
    fake.configure("fail=cuMemcpyHtoDAsync:6:999:-1")  # one batch before, then in the thread
    with pytest.raises(DeviceError, match="cuMemcpyHtoDAsync: CUDA_ERROR_UNKNOWN"):
        open_gpu_engine(8, "auto")
    settings = Settings(tmp_path / "home")
    noted = settings.home / "state" / "devices.json"
    assert not noted.exists() or "gpus" not in json.loads(noted.read_text())
    fake.configure("mend,fail=cuMemHostRegister:0:801:-1")
    engine = open_gpu_engine(8, "auto")
    speeds = remembered_contended(settings, "Fake GPU", of_the_demo(engine))
    assert speeds is not None
    assert speeds.bus_bytes_per_s > 0
    assert len(tokens(engine, "17+25=")) == 3
    assert any("0 of 192 host slots are page-locked" in note for note in engine.take_notes())


@pytest.mark.parametrize(
    ("cuda", "available", "capability", "words"),
    [
        (None, False, (9, 0), "this torch does not support it"),
        ("13.0", False, (9, 0), "its driver cannot run CUDA 13.0, which this torch needs"),
        ("13.0", True, (7, 5), "its compute capability is 7.5, and the kernels need 8.0 (Ampere)"),
        ("13.0", True, (8, 0), None),
        ("13.0", True, (12, 0), None),
    ],
)
def test_what_kernels_need(
    cuda: str | None, available: bool, capability: tuple[int, int], words: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(gpus, "triton_fault", lambda: None)
    assert gpus.missing_for_kernels() == words


def test_what_triton_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = pytest.importorskip("triton.runtime")

    class Broken:
        @property
        def active(self) -> object:
            raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    monkeypatch.setattr(runtime, "driver", Broken())
    assert gpus.triton_fault() == "Triton cannot start kernels: Failed to find C compiler."
    monkeypatch.setattr(runtime, "driver", Mock())
    assert gpus.triton_fault() is None


@pytest.mark.parametrize("miss", MISSES)
def test_a_failed_copy_is_an_error_and_the_engine_goes_on(
    fake: Fake, miss: Miss, open_engine: Open, open_gpu_engine: Open
) -> None:
    expected = tokens(open_engine(), PROMPTS[2])
    engine = open_gpu_engine(6, miss)
    fake.configure("fail=cuMemcpyHtoDAsync:20:999:1")
    with pytest.raises(DeviceError, match="cuMemcpyHtoDAsync: CUDA_ERROR_UNKNOWN"):
        [tokens(engine, prompt) for prompt in PROMPTS]
    assert engine.store.idle
    assert tokens(engine, PROMPTS[2]) == expected


def test_no_gpu_no_torch_for_it_and_no_such_budget(
    fake: Fake, demo_home: Path, open_gpu_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "missing_for_kernels", lambda: "this torch does not support it")
    with pytest.raises(
        DeviceUnavailable, match="Fake GPU cannot be used: this torch does not support it"
    ):
        open_gpu_engine(8)
    fake.configure("devices=0")
    forget_gpus()
    with pytest.raises(DeviceUnavailable, match="cuInit: CUDA_ERROR_NO_DEVICE"):
        open_gpu_engine(8)
    manifest, folder = Library(Settings(demo_home)).read("demo")
    nowhere = EngineConfig(device="cuda", libcuda="/nowhere/libcuda.so.1")
    with pytest.raises(DeviceUnavailable, match=r"/nowhere/libcuda\.so\.1"):
        Engine.open(manifest, folder, nowhere, Settings(demo_home))
    share = EngineConfig(device="cpu", device_memory=MemorySize(share=0.5))
    with pytest.raises(DeviceUnavailable, match="--device-memory needs a GPU"):
        Engine.open(manifest, folder, share, Settings(demo_home))
    assert torch.get_num_threads() > 0
