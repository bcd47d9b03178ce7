"""Assertions for an engine with dense weights and KV cache on any GPU.

test_real_gpu.py calls it on a real GPU with the product's kernels. test_dense_on_gpu.py calls it
with the fake. That shows that the assertions and this file work.

Logits are compared with the CPU's engine over the same tokens. Both round after every product, to 8
bits of mantissa (bfloat16) or 7 (activations of the other formats). The order of operations
differs, so the logits differ. The fake differs only in the order of attention. Its median step is
0.5 to 1.5 % of the CPU's logits away. A token near a routing border may go to another expert, and
then the distance is up to 30 %. So half of the steps must be within NEAR, all but two within FAR,
and all within FARTHEST. Unrelated logits are 140 % apart.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.gpu_tier.miss_split import Miss
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.machine.gpu import Gpu, find_gpu
from moeinf.runtime.placement.gpu_plan import CODE_BYTES, CONTEXT_BYTES, dense_workspace_bytes
from moeinf.runtime.sizes import parse_memory
from scripts.make_checkpoint import byte_tokenizer
from tests.conftest import pull
from tests.tiny import save_tiny
from tests.tiny_families import Tiny
from tests.tiny_mxfp4 import save_mxfp4

# Checkpoint and tag: every format of experts, grouped-query and latent attention, a window, sinks.
MODELS = [
    ("demo", "bf16"), ("demo", "q8"), ("demo", "q4"), ("gpt-oss-blocks", "mxfp4"),
    ("deepseek-lite", "bf16"),
]  # fmt: skip
NEAR, FAR, FARTHEST = 0.05, 0.1, 0.7
CONTEXT = 400  # or the model's maximum
STEPS = 10  # decoded; the third step is the first one with graphs
Logits = list[NDArray[np.float32]]


@dataclass(frozen=True)
class Answer:
    """The tokens, and the logits after the prompt and after every token."""

    logits: Logits
    tokens: list[int]


@dataclass(frozen=True)
class Installed:
    """A model, its folder, and the answer of the CPU's engine."""

    manifest: Manifest
    settings: Settings
    expected: Answer

    @property
    def folder(self) -> Path:
        return Library(self.settings).folder(self.manifest.model)


def installed(name: str | Tiny, tag: str, place: Path) -> Installed:
    """Pull the model below `place`."""
    checkpoint = place / "checkpoint"
    if name == "demo":
        shutil.copytree(DEMO_CHECKPOINT, checkpoint)
    else:
        if tag == "mxfp4":
            save_mxfp4(checkpoint)
        else:
            save_tiny(name, checkpoint, seed=3)
        byte_tokenizer().save(str(checkpoint / "tokenizer.json"))
    settings = Settings(place / "home")
    manifest = pull(checkpoint, settings, f"tiny:{tag}")
    config = EngineConfig(memory=parse_memory("100%"), context=context_of(manifest))
    with Engine.open(
        manifest, Library(settings).folder(manifest.model), config, settings
    ) as engine:
        return Installed(manifest, settings, answered(engine))


def context_of(manifest: Manifest) -> int:
    return min(CONTEXT, manifest.max_context)


def answered(engine: Engine, forced: list[int] | None = None) -> Answer:
    """Answer a prompt with the engine's most likely tokens, or with `forced` ones.

    The prompt gives some experts more than 16 rows. It has more than one chunk if the context has
    room.
    """
    state = engine.new_state()
    prompt = [5 + 7 * i % 89 for i in range(context_of(engine.info.manifest) - 2 * STEPS)]
    request = engine.begin_request(state)
    logits, tokens = [engine.extend(state, prompt).copy()], list[int]()
    for step in range(STEPS):
        tokens.append(int(logits[-1].argmax()) if forced is None else forced[step])
        logits.append(engine.extend(state, tokens[-1:]).copy())  # the next replay overwrites them
    engine.end_request(request, counts=False)
    assert engine.store.idle
    return Answer(logits, tokens)


def opened(model: Installed, slots: int, miss: Miss, library: str | None) -> Engine:
    """Open an engine whose budget fits dense weights, KV cache and `slots` slots exactly."""
    gpu = find_gpu(library)
    assert isinstance(gpu, Gpu)
    manifest, context = model.manifest, context_of(model.manifest)
    budget = CONTEXT_BYTES if gpu.context_bytes is None else gpu.context_bytes + CODE_BYTES
    budget += dense_workspace_bytes(manifest, context) + manifest.dense_bytes
    budget += manifest.kv_bytes(context) + slots * manifest.slots.slot_bytes
    config = EngineConfig(
        memory=parse_memory("100%"), context=context, device="cuda", miss=miss, libcuda=library,
        device_memory=parse_memory(str(budget)),
    )  # fmt: skip
    return Engine.open(manifest, model.folder, config, model.settings)


def check(model: Installed, library: str | None, graphs_pay: bool) -> None:
    """Check all slot counts and miss modes.

    graphs_pay: graphs must be used; otherwise a note may give the reason against them.
    """
    sizes, own = model.manifest.slots, dict[tuple[int, Miss], Answer]()
    few, some, all_of_them = sizes.top_k, max(sizes.top_k, sizes.experts // 3), sizes.experts
    ways: list[tuple[int, Miss]] = [(few, "fetch"), (some, "fetch"), (all_of_them, "fetch")]
    ways += [(some, "compute"), (few, "auto"), (some, "auto")]
    for slots, miss in ways:
        with opened(model, slots, miss, library) as engine:
            check_place(engine, slots)
            near(answered(engine, model.expected.tokens).logits, model.expected.logits)
            own[slots, miss] = answered(engine)
            check_graphs(engine, graphs_pay)
            check_promise(engine, library)
    first, *others = own.values()
    for answer in others:
        assert answer.tokens == first.tokens
    for slots in (some, all_of_them):  # with all experts on the device, residency chooses nothing
        for mine, its in zip(own[slots, "fetch"].logits, first.logits, strict=True):
            np.testing.assert_array_equal(mine, its)


def check_place(engine: Engine, slots: int) -> None:
    placed = engine.info.placement.on_device
    assert placed is not None
    assert placed.inside
    assert placed.slots == slots


def near(found: Logits, expected: Logits) -> None:
    """Assert the distances that the module docstring describes."""
    distances = [
        float(np.linalg.norm(mine - its) / np.linalg.norm(its))
        for mine, its in zip(found, expected, strict=True)
    ]
    half, most, last = (sorted(distances)[place] for place in (len(distances) // 2, -3, -1))
    assert half <= NEAR, distances
    assert most <= FAR, distances
    assert last <= FARTHEST, distances


def check_graphs(engine: Engine, pay: bool) -> None:
    """Assert that graphs were measured once and are used, or that a note gives the reason.

    pay: they must be used.
    """
    assert engine.gpu is not None
    inside = engine.gpu.dense_math
    assert inside is not None
    if inside.graphs is not None:
        assert inside.graphs.startswith("the dense part of a token takes")
        return
    assert not pay, inside.note
    assert inside.note is not None
    reasons = ("the dense part of a token", "they need torch")
    assert inside.note.startswith(tuple(f"no CUDA graphs: {why}" for why in reasons)), inside.note


def check_promise(engine: Engine, library: str | None) -> None:
    """Assert that the process stays within --device-memory, measured by NVML where possible."""
    gpu = find_gpu(library)
    assert isinstance(gpu, Gpu)
    assert engine.gpu is not None
    held = engine.gpu.promise.look()
    assert held.measured == (gpu.context_bytes is not None)
    assert held.peak_bytes <= engine.gpu.placement.budget_bytes, held
