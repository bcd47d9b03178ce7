"""A process's GPU memory as NVML counts it; an engine stays within --device-memory.

The fake libcuda is its own NVML (tests/native/fake_libcuda.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moeinf.native import DeviceContext, Driver
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.engine.gpu_budget import Held
from moeinf.runtime.library.library import Library
from moeinf.runtime.machine import gpu as gpus
from moeinf.runtime.placement.gpu_plan import CODE_BYTES, CONTEXT_BYTES, workspace_bytes
from moeinf.runtime.sizes import parse_memory
from tests.conftest import Open
from tests.fake_device import FakeDevice
from tests.native.fake_cuda import Fake
from tests.runtime.engine.test_engine import PROMPTS, tokens

OWN = 300 << 20  # of the fake's context
SLOT = 49152  # of the demo's experts in bf16


@pytest.fixture
def there(fake: Fake, new_to_gpus: None) -> Callable[[str], gpus.Gpu]:
    """Return a function that finds the GPU; another process holds 50 MiB of it.

    Example: there("nvml=processes").
    """

    def found(words: str) -> gpus.Gpu:
        fake.reset(f"mode=at_once,memory=2000000000,context={OWN},others={50 << 20},{words}")
        gpu = gpus.find_gpu(fake.path)
        assert isinstance(gpu, gpus.Gpu)
        return gpu

    return found


Opened = Callable[..., tuple[Engine, int]]


@pytest.fixture
def opened(
    there: Callable[[str], gpus.Gpu],
    fake: Fake,
    demo_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Opened]:
    """Return a function that opens an engine with a number of device slots.

    opened(nvml, slots) returns the engine and its --device-memory.
    """
    monkeypatch.setattr(gpus, "missing_for_kernels", lambda: None)
    monkeypatch.setattr(gpus, "torch_device", lambda *_: FakeDevice(fake))
    (tmp_path / "models").symlink_to(demo_home / "models")
    engines: list[Engine] = []

    def open_one(nvml: str, slots: int, spare: int = 0) -> tuple[Engine, int]:
        gpu, settings = there(nvml), Settings(tmp_path)
        manifest, folder = Library(settings).read("demo")
        own = CONTEXT_BYTES if gpu.context_bytes is None else gpu.context_bytes + CODE_BYTES
        budget = own + workspace_bytes(manifest) + slots * SLOT + spare
        given: dict[str, Any] = {"device": "cuda", "miss": "fetch", "libcuda": fake.path}
        memory = parse_memory("30%"), parse_memory(str(budget))
        config = EngineConfig(memory=memory[0], device_memory=memory[1], **given)
        engines.append(Engine.open(manifest, folder, config, settings))
        assert engines[-1].take_notes() == list(engines[-1].info.placement.fallbacks)
        return engines[-1], budget

    yield open_one
    for engine in engines:
        engine.close()


def slots_of(engine: Engine) -> int:
    plan = engine.info.placement.on_device
    assert plan is not None
    return plan.slots


@pytest.mark.parametrize("nvml", ["nvml=processes", "nvml=device"])
def test_others_are_not_counted(nvml: str, there: Callable[[str], gpus.Gpu], fake: Fake) -> None:
    gpu = there(nvml)
    assert gpu.context_bytes == OWN
    assert gpu.free_bytes == 2000000000 - OWN - (50 << 20)
    held = gpus.held_memory(gpu)
    # without figures per process, memory that others allocate later counts as ours
    fake.configure(f"others={90 << 20}")
    assert held.now_bytes() == OWN + (0 if nvml == "nvml=processes" else 40 << 20)
    assert held.of_process_bytes() == (OWN if nvml == "nvml=processes" else None)


def test_without_nvml_nothing_is_known(there: Callable[[str], gpus.Gpu]) -> None:
    gpu = there("")
    assert gpu.context_bytes is gpus.held_memory(gpu).now_bytes() is None


@pytest.mark.parametrize("nvml", ["nvml=processes", "nvml=device", "seed=1"])
def test_plans_count_what_cuda_takes(nvml: str, opened: Opened, fake: Fake) -> None:
    engine, budget = opened(nvml, 40)
    assert slots_of(engine) == 40
    (words,) = [line for line in engine.info.choices if line.startswith("device memory ")]
    if nvml == "seed=1":
        assert words.endswith("512 MiB for CUDA itself (assumed)")
    else:
        assert words.endswith(
            "428 MiB for CUDA itself (300 MiB by NVML's count, and 128 MiB for code to come)"
        )
    tokens(engine, PROMPTS[0])
    assert engine.gpu is not None
    found, there = engine.gpu.promise.look(), CONTEXT_BYTES if nvml == "seed=1" else OWN
    assert found == Held(there + 40 * SLOT, nvml != "seed=1")
    assert found.peak_bytes <= budget
    fake.configure(f"context={OWN - 5}")
    assert engine.gpu.promise.look() == found  # the largest figure seen
    assert engine.take_notes() == []


@pytest.mark.full
def test_experts_make_room_for_what_cuda_takes(
    opened: Opened, fake: Fake, open_engine: Open
) -> None:
    expected = [tokens(open_engine(), prompt) for prompt in PROMPTS]
    engine, budget = opened("nvml=processes", 40)
    assert [tokens(engine, prompt) for prompt in PROMPTS] == expected
    state = engine.new_state()
    request = engine.begin_request(state)
    engine.extend(state, [1, 2, 3])
    fake.configure(f"context={OWN + CODE_BYTES + 2 * SLOT + 1}")
    engine.end_request(request, counts=False)
    (note,) = engine.take_notes()
    assert note == ("CUDA itself takes 96.0 KiB more than counted: 5 device slots given back")
    assert engine.gpu is not None
    assert fake.count("allocated") == 35 * SLOT  # and a sixteenth of all is a reserve
    device = engine.gpu.device
    assert isinstance(device, FakeDevice)
    assert (
        device.limits[-1] == budget - OWN - CODE_BYTES - 2 * SLOT - 1 - 40 * SLOT // 16 - 35 * SLOT
    )
    assert engine.gpu.promise.look().peak_bytes <= budget
    assert [tokens(engine, prompt) for prompt in PROMPTS] == expected
    assert engine.take_notes() == []  # the memory is counted now
    fake.configure(f"context={OWN + CODE_BYTES + 4 * SLOT}")
    tokens(engine, PROMPTS[0])  # the budget has room for it: nothing is evicted a second time
    assert fake.count("allocated") == 35 * SLOT
    assert engine.take_notes() == []
    assert engine.store.idle


def test_what_the_budget_has_room_for_costs_no_expert(opened: Opened, fake: Fake) -> None:
    engine, budget = opened("nvml=processes", 40, spare=SLOT - 1)
    tokens(engine, PROMPTS[0])
    resident = engine.store.device_resident
    for own, slots in ((SLOT - 1, 40), (SLOT, 37)):
        request = engine.begin_request(engine.new_state())
        fake.configure(f"context={OWN + CODE_BYTES + own}")
        engine.end_request(request, counts=False)
        assert fake.count("allocated") == slots * SLOT
        assert engine.gpu is not None
        device = engine.gpu.device
        assert isinstance(device, FakeDevice)
        more = 40 * SLOT // 16 if slots == 37 else 0
        assert device.limits[-1] == budget - OWN - CODE_BYTES - own - more - slots * SLOT
        notes = engine.take_notes()
        assert len(notes) == (slots == 37)
        assert engine.store.device_resident == (resident if slots == 40 else 0)


@pytest.mark.parametrize("said", [0, 3])
def test_less_than_is_held_for_certain_is_no_figure(
    said: int, there: Callable[[str], gpus.Gpu], fake: Fake
) -> None:
    """In a container, NVML may list the process but not its memory."""
    gpu = there(f"nvml=processes,said={said}")
    held = gpus.held_memory(gpu)
    assert gpu.context_bytes == OWN  # the growth of the whole device's memory
    assert held.now_bytes(4) == OWN
    assert held.of_process_bytes(4) is None
    assert held.now_bytes(OWN + 1) is None


def test_a_context_that_was_there_before_is_not_measured(
    there: Callable[[str], gpus.Gpu], fake: Fake
) -> None:
    context = DeviceContext(Driver(fake.path))
    assert there("nvml=device").context_bytes is None
    assert context.allocated_bytes == 0


def test_what_a_prefill_takes_is_seen(opened: Opened, fake: Fake) -> None:
    """The memory counts although it is freed before the answer ends."""
    engine, _ = opened("nvml=device", 40)
    assert engine.gpu is not None
    state, before = engine.new_state(), engine.gpu.promise.look().peak_bytes
    model = engine.model
    extend = model.extend
    with pytest.MonkeyPatch.context() as patch:

        def takes(*given: Any, **named: Any) -> Any:
            fake.configure(f"others={90 << 20}")
            return extend(*given, **named)

        patch.setattr(model, "extend", takes)
        engine.extend(state, [1, 2, 3])
    fake.configure(f"others={50 << 20}")
    engine.extend(state, [4])
    assert engine.gpu.promise.look().peak_bytes == before + (40 << 20)


def test_where_there_is_no_room_for_more_it_is_just_enough(opened: Opened, fake: Fake) -> None:
    engine, _ = opened("nvml=processes", 6)
    request = engine.begin_request(engine.new_state())
    fake.configure(f"context={OWN + CODE_BYTES + 5 * SLOT - 1}")
    engine.end_request(request, counts=False)
    assert fake.count("allocated") == SLOT
    (note,) = engine.take_notes()
    assert note.endswith("5 device slots given back")


def test_where_too_few_slots_are_left_it_is_said(opened: Opened, fake: Fake) -> None:
    engine, _ = opened("nvml=processes", 4)
    request = engine.begin_request(engine.new_state())
    fake.configure(f"context={OWN + CODE_BYTES + 4 * SLOT}")
    engine.end_request(request, counts=False)
    (note,) = engine.take_notes()
    assert note.endswith("--device-memory is exceeded")
    assert fake.count("allocated") == 4 * SLOT


def test_what_another_process_takes_is_not_made_room_for(opened: Opened, fake: Fake) -> None:
    engine, _ = opened("nvml=device", 4)
    request = engine.begin_request(engine.new_state())
    fake.configure(f"others={400 << 20}")
    engine.end_request(request, counts=False)
    assert engine.take_notes() == []
