"""Dense weights and KV cache on a device, for every family: the reference's tokens.

No GPU is needed. The fake libcuda copies, CPU kernels compute experts, and torch computes the rest.
No operation may mix tensors of device and host (tests/strict_device.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from moeinf.models.layers.moe import one_pass
from moeinf.models.seq2seq.encoder_decoder import EncoderDecoder
from moeinf.native import DeviceError
from moeinf.offload.gpu_tier.layer_runner import OutOfMemory
from moeinf.offload.gpu_tier.miss_split import MISSES, Miss
from moeinf.offload.store.prefetch_gate import Throttle
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.machine.gpu import device_faults
from moeinf.runtime.placement.gpu_plan import CONTEXT_BYTES, dense_workspace_bytes
from moeinf.runtime.sizes import parse_memory
from tests.conftest import endless, pull
from tests.generating import answering
from tests.native.fake_cuda import Fake
from tests.runtime import on_a_gpu
from tests.runtime.engine.test_families import CONFIGS, pulled
from tests.runtime.generation.test_seq2seq import checkpoint
from tests.strict_device import PLACE, Strict
from tests.strict_fake import StrictFake


def config_of(
    fake: Fake, manifest: Manifest, slots: int | None = None, memory: str = "100%",
    miss: Miss = "fetch", context: int | None = None,
) -> EngineConfig:  # fmt: skip
    """Return the config of an engine on the fake device.

    slots: device slots beside dense weights and KV cache; None: as many as fit.
    """
    budget = None
    if slots is not None:
        assert context is not None
        fixed = CONTEXT_BYTES + manifest.dense_bytes + manifest.kv_bytes(context)
        fixed += dense_workspace_bytes(manifest, context) + slots * manifest.slots.slot_bytes
        budget = parse_memory(str(fixed))
    return EngineConfig(
        memory=parse_memory(memory), device="cuda", miss=miss, libcuda=fake.path,
        device_memory=budget, context=context,
    )  # fmt: skip


def greedy(engine: Engine, prompt: list[int], count: int) -> list[int]:
    plan = engine.info.placement.on_device
    assert plan is not None
    assert plan.inside
    endless(engine)
    generation = answering(engine, prompt, count)
    list(generation)
    assert engine.store.idle
    return generation.tokens


@pytest.mark.first
@pytest.mark.parametrize("name", CONFIGS)
def test_float32_equals_transformers_token_for_token(
    name: str, fake: Fake, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    settings, manifest, prompt, expected = pulled(name, tmp_path, 8)
    request.getfixturevalue("strict")
    folder, sizes = Library(settings).folder(manifest.model), manifest.slots
    cases = list(zip((sizes.max_bytes, 0, sizes.max_bytes // 2), MISSES, strict=True))
    # A family's layers do not know where experts are: the first one tries all, the others the last.
    for size, miss in cases if name == CONFIGS[0] else cases[-1:]:
        config = config_of(fake, manifest, None, str(max(size, sizes.min_bytes)), miss)
        with Engine.open(manifest, folder, config, settings) as engine:
            assert greedy(engine, prompt, 8) == expected


@pytest.mark.parametrize(
    ("form", "encoder_layers", "masks"), [("f32", 0, 0), ("bf16", 0, 0), ("f32", 1, 4 * 256)]
)
def test_what_a_longer_context_takes_beside_its_cache(
    form: str, encoder_layers: int, masks: int, tmp_path: Path
) -> None:
    """A chunk needs a head's keys and values, and for torch's attention a mask of its tokens."""
    manifest = pull(DEMO_CHECKPOINT, Settings(tmp_path / "home"), f"demo:{form}")
    manifest = msgspec.structs.replace(manifest, encoder_layers=encoder_layers, max_context=200)
    short, long = (dense_workspace_bytes(manifest, context) for context in (1000, 3000))
    assert long - short == 2000 * ({"f32": 4096, "bf16": 2048}[form] + masks)


@pytest.mark.parametrize("name", ["switch", "nllb"])
def test_encoder_decoders(
    name: str, fake: Fake, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    checkpoint(name, tmp_path / "checkpoint", eos_token_id=None)
    settings = Settings(tmp_path / "home")
    manifest = pull(tmp_path / "checkpoint", settings, "tiny:f32")
    folder = Library(settings).folder(manifest.model)

    def answer(config: EngineConfig) -> list[int]:
        with Engine.open(manifest, folder, config, settings) as engine:
            assert isinstance(engine.model, EncoderDecoder)
            state, tokens = engine.new_state(), [engine.model.start_token]
            engine.encode(state, list(b"seventeen and twenty-five"))
            for _ in range(8):
                tokens.append(int(engine.extend(state, tokens[-1:]).argmax()))
            assert engine.store.idle
            return tokens

    expected = answer(EngineConfig())
    request.getfixturevalue("strict")
    for memory, miss in (("100%", "fetch"), (str(manifest.slots.min_bytes), "auto")):
        assert answer(config_of(fake, manifest, None, memory, miss)) == expected


@pytest.mark.first
@pytest.mark.parametrize("form", ["bf16", "q8"])
def test_residency_chooses_nothing(
    form: str, fake: Fake, devices: list[StrictFake], tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """The fake computes an expert like the CPU, so slots and misses do not change a bit."""
    settings = Settings(tmp_path / "home")
    manifest = pull(DEMO_CHECKPOINT, settings, f"demo:{form}")
    folder = Library(settings).folder(manifest.model)
    request.getfixturevalue("strict")
    prompt, found = list(b"17+25="), []
    for slots, memory, miss in (
        (None, "100%", "fetch"), (4, "30%", "fetch"), (30, "30%", "compute"), (60, "10%", "auto"),
    ):  # fmt: skip
        config = config_of(fake, manifest, slots, memory, miss, 64)
        with Engine.open(manifest, folder, config, settings) as engine:
            found.append(greedy(engine, prompt, 12))
            plan = engine.info.placement.on_device
            assert plan is not None
            assert slots is None or plan.slots == slots
            assert plan.arena_bytes == fake.count("allocated")
            torchs = plan.budget_bytes - plan.context_bytes - plan.arena_bytes
            assert devices[-1].limits[1:] == [torchs]
        assert devices[-1].limits[-1] == 0  # cleared on close
    assert found == found[:1] * 4


@pytest.mark.first
@pytest.mark.parametrize(("name", "tag"), on_a_gpu.MODELS)
def test_what_a_real_gpu_must_do_this_one_does(
    name: str, tag: str, fake: Fake, tmp_path: Path, new_to_gpus: None,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    model = on_a_gpu.installed(name, tag, tmp_path)
    request.getfixturevalue("strict")
    fake.reset("mode=deferred,seed=3,memory=2000000000,context=314572800,nvml=processes")
    on_a_gpu.check(model, fake.path, graphs_pay=True)


def test_no_memory_between_experts(
    fake: Fake, devices: list[StrictFake], demo_home: Path, request: pytest.FixtureRequest
) -> None:
    """Dense weights run out of memory: half of the slots go to torch, once per pass."""
    settings = Settings(demo_home)
    manifest, folder = Library(settings).read("demo")
    request.getfixturevalue("strict")
    with Engine.open(
        manifest, folder, config_of(fake, manifest, 9, context=64), settings
    ) as engine:
        first = greedy(engine, list(b"17+25="), 6)
        device = devices[-1]
        device.scarce = 1
        assert greedy(engine, list(b"17+25="), 6) == first
        assert engine.store.device.slots == 4
        assert device.limits[2] - device.limits[1] == 5 * manifest.slots.slot_bytes
        assert (
            "the GPU ran out of memory: it holds 4 experts now, not 9; use a smaller --ctx, "
            "or free the device memory of other programs"
        ) in engine.take_notes()
        device.scarce = 1 << 30
        with pytest.raises(OutOfMemory, match="no device memory is left for a pass"):
            greedy(engine, list(b"17+25="), 6)
        device.scarce = 0
        assert greedy(engine, list(b"17+25="), 6) == first


def test_too_little_for_dense_weights_keeps_them_in_ram(
    fake: Fake, demo_home: Path, request: pytest.FixtureRequest
) -> None:
    settings = Settings(demo_home)
    manifest, folder = Library(settings).read("demo")
    request.getfixturevalue("strict")
    fits = config_of(fake, manifest, manifest.slots.top_k, context=64)
    assert fits.device_memory is not None
    less = replace(fits, device_memory=parse_memory(str(fits.device_memory.of(0) - 1)))
    plans = []
    for config in (fits, less):
        with Engine.open(manifest, folder, config, settings) as engine:
            plans.append(engine.info.placement)
            assert engine.take_notes() == list(engine.info.placement.fallbacks)
            assert not set(engine.info.choices) & set(engine.info.placement.fallbacks)
    inside, outside = (plan.on_device for plan in plans)
    assert inside is not None
    assert outside is not None
    assert (inside.inside, outside.inside) == (True, False)
    assert inside.slots == manifest.slots.top_k < outside.slots
    assert plans[1].peak_bytes - plans[0].peak_bytes == manifest.dense_bytes + manifest.kv_bytes(64)
    assert plans[0].fallbacks == ()
    (note,) = plans[1].fallbacks
    assert "stay in RAM" in note
    assert note.endswith(
        f"--device-memory {-(-inside.budget_bytes >> 20)}MiB with --ctx 64, or a smaller --ctx"
    )


@pytest.fixture(params=["100%", "30%"])
def demo(
    fake: Fake, demo_home: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[tuple[Engine, Strict]]:
    """Return the demo, fully on the device after use, with any RAM and the most hints."""
    settings = Settings(demo_home)
    manifest, folder = Library(settings).read("demo")
    monkeypatch.setattr(Throttle, "open", True)
    config = config_of(fake, manifest, memory=request.param)
    strict: Strict = request.getfixturevalue("strict")
    with Engine.open(manifest, folder, config, settings) as engine:
        yield engine, strict


def use_everybody(engine: Engine) -> None:
    """Use every expert: with little RAM, an unused one may never be loaded."""
    shape, store = engine.model.moe, engine.store
    x = torch.ones(1, shape.hidden, dtype=torch.bfloat16, device=PLACE)
    for first in range(0, shape.experts, shape.top_k):
        ids = torch.arange(first, first + shape.top_k, device=PLACE)[None]
        with one_pass(store, torch.zeros(1, dtype=torch.int64), "prefill"):
            for layer in range(shape.layers):
                store.submit(layer, x, ids, torch.ones(ids.shape, device=PLACE)).result()


def test_once_all_are_there_a_token_waits_for_nothing_but_its_logits(
    demo: tuple[Engine, Strict],
) -> None:
    engine, strict = demo
    state = engine.new_state()
    request = engine.begin_request(state)
    use_everybody(engine)
    engine.extend(state, list(range(5, 25)))
    events, tokens = 0, 0
    while engine.store.device_resident < engine.info.experts or tokens < 6:
        before, events = strict.waits.copy(), engine.store.stats.decode_events
        pinned = strict.pinned
        engine.extend(state, [7])
        tokens = tokens + 1 if engine.store.device_resident == engine.info.experts else 0
    assert strict.waits - before == {"cpu": 1, "copy_": 1, "numpy": 1}  # counts, logits, the trace
    assert strict.pinned - pinned == 1  # the logits
    layer = engine.info.manifest.top_k * engine.info.manifest.layers
    assert engine.store.stats.decode_events - events == layer
    assert engine.store.stats.bus_bytes == engine.info.manifest.slots.max_bytes
    engine.end_request(request, counts=True)


@pytest.mark.matrix
@pytest.mark.parametrize("policy", ["lru", "adaptive"])
@pytest.mark.parametrize("miss", ["compute", "auto"])
def test_the_cpu_does_not_wait_for_what_the_device_computes(
    miss: Miss, policy: str, fake: Fake, devices: list[StrictFake], demo_home: Path,
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """In a layer one copy to the host comes before the first kernel of its experts.

    It has routing, x and a hint for the next layer, which `lru` does not request.
    """
    settings = Settings(demo_home)
    manifest, folder = Library(settings).read("demo")
    request.getfixturevalue("strict")
    monkeypatch.setattr(Throttle, "open", True)
    config = replace(config_of(fake, manifest, 40, "30%", miss, 64), policy=policy)
    with Engine.open(manifest, folder, config, settings) as engine:
        device, store, seen = devices[-1], engine.store, ""
        launch, download, submit = device.launch, device.download, store.submit

        def note(letter: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def noted(*given: Any) -> Any:
                nonlocal seen
                seen += letter or str(len(given))
                return call(*given)

            return noted

        monkeypatch.setattr(device, "launch", note("k", launch))
        monkeypatch.setattr(device, "download", note("", download))
        monkeypatch.setattr(store, "submit", note(".", submit))
        greedy(engine, list(b"17+25="), 12)
        layers = seen.split(".")[1:]
        read = {"".join(filter(str.isdigit, layer)) for layer in layers if "k" in layer}
        assert read - {"", "1"} == ({"2", "3"} if policy == "adaptive" else {"2"})
        assert not any(re.search(r"k\d", layer) for layer in layers)
        assert store.stats.decode_cpu_events > 0 or miss == "auto"


def test_what_torch_says_of_a_failed_device_is_a_device_error(
    fake: Fake, devices: list[StrictFake], demo_home: Path, request: pytest.FixtureRequest
) -> None:
    """Other errors, such as bugs of moeinf, keep their type."""
    settings = Settings(demo_home)
    manifest, folder = Library(settings).read("demo")
    request.getfixturevalue("strict")
    illegal = "CUDA error: an illegal memory access was encountered"
    with Engine.open(
        manifest, folder, config_of(fake, manifest, 9, context=64), settings
    ) as engine:
        first = greedy(engine, list(b"17+25="), 6)
        for fault in (
            torch.AcceleratorError(illegal + "\nFor debugging consider CUDA_LAUNCH_BLOCKING"),
            RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
            RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        ):
            devices[-1].faults.append(fault)
            with pytest.raises(DeviceError) as caught:
                greedy(engine, list(b"17+25="), 6)
            assert str(caught.value) == str(fault).splitlines()[0]
            assert caught.value.__cause__ is fault
            assert engine.store.idle
        for mistake in (
            RuntimeError("expected all tensors to be on the same device"),
            torch.AcceleratorError("CUDA error: device-side assert triggered"),
            ValueError(illegal),
        ):
            devices[-1].faults.append(mistake)
            with pytest.raises(type(mistake)) as same:
                greedy(engine, list(b"17+25="), 6)
            assert same.value is mistake
        assert greedy(engine, list(b"17+25="), 6) == first


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "Triton Error [CUDA]: out of memory",
    ],
)
def test_no_memory_beside_torchs_is_one_of_memory(
    words: str, fake: Fake, devices: list[StrictFake], demo_home: Path,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """Experts make room once; the second failure is reported as out of memory."""
    settings = Settings(demo_home)
    manifest, folder = Library(settings).read("demo")
    request.getfixturevalue("strict")
    with Engine.open(
        manifest, folder, config_of(fake, manifest, 9, context=64), settings
    ) as engine:
        first = greedy(engine, list(b"17+25="), 6)
        devices[-1].faults.append(RuntimeError(words))
        assert greedy(engine, list(b"17+25="), 6) == first
        assert any("it holds 4 experts now, not 9" in note for note in engine.take_notes())
        devices[-1].faults += [RuntimeError(words), RuntimeError(words)]
        with pytest.raises(OutOfMemory, match="no device memory is left for a pass"):
            greedy(engine, list(b"17+25="), 6)
        assert greedy(engine, list(b"17+25="), 6) == first


def test_tritons_own_errors_are_the_devices() -> None:
    errors = pytest.importorskip("triton.runtime.errors")
    with pytest.raises(DeviceError, match="out of resource: shared memory"), device_faults():
        raise errors.OutOfResources(200_000, 101_376, "shared memory")
    with pytest.raises(errors.AutotunerError), device_faults():
        raise errors.AutotunerError("ours")


def test_an_older_torch_needs_no_graphs_on_a_gpu() -> None:
    """Its note is a reason, too: on perfect hardware with torch 2.11 nothing else is wrong."""
    for words in ("they need torch 2.13, and this is 2.11.0", "the dense part of a token takes 2"):
        pieces = SimpleNamespace(graphs=None, note=f"no CUDA graphs: {words}")
        engine: Any = SimpleNamespace(gpu=SimpleNamespace(dense_math=pieces))
        on_a_gpu.check_graphs(engine, pay=False)
        with pytest.raises(AssertionError):
            on_a_gpu.check_graphs(engine, pay=True)
    pieces.note = "no CUDA graphs: their results differ"
    with pytest.raises(AssertionError):
        on_a_gpu.check_graphs(engine, pay=False)
