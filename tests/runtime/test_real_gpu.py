"""Engines on a real GPU, against the CPU; skipped without a GPU.

With dense weights and KV cache on the GPU, on_a_gpu.py has the assertions. They cover linears,
attention, router, prefill and graphs. With dense weights in RAM, only experts use the GPU: the
CPU's tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moeinf.offload.gpu_tier.miss_split import MISSES, Miss
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from moeinf.runtime.machine.gpu import Gpu, find_gpu
from moeinf.runtime.placement.gpu_plan import CODE_BYTES, CONTEXT_BYTES, workspace_bytes
from moeinf.runtime.sizes import parse_memory
from tests.conftest import pull
from tests.runtime import on_a_gpu
from tests.runtime.engine.test_engine import PROMPTS, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize(("name", "tag"), on_a_gpu.MODELS)
def test_dense_weights_there(name: str, tag: str, tmp_path: Path) -> None:
    on_a_gpu.check(on_a_gpu.installed(name, tag, tmp_path), None, graphs_pay=False)


@pytest.mark.parametrize("tag", ["bf16", "q8", "q4"])
def test_the_cpus_tokens_with_dense_weights_in_ram(tag: str, tmp_path: Path) -> None:
    """The kernels of experts with up to 16 rows give the CPU's bits."""
    settings = Settings(tmp_path)
    manifest = pull(DEMO_CHECKPOINT, settings, f"demo:{tag}")
    folder = Library(settings).folder(manifest.model)
    with Engine.open(manifest, folder, EngineConfig(), settings) as engine:
        expected = [tokens(engine, prompt) for prompt in PROMPTS]
    gpu = find_gpu()
    assert isinstance(gpu, Gpu)
    own = CONTEXT_BYTES if gpu.context_bytes is None else gpu.context_bytes + CODE_BYTES
    ways: list[tuple[int, Miss]] = [(slots, miss) for slots in (4, 60) for miss in MISSES]
    for slots, miss in ways:
        budget = own + workspace_bytes(manifest) + slots * manifest.slots.slot_bytes
        config = EngineConfig(
            memory=parse_memory("30%"), device="cuda", miss=miss,
            device_memory=parse_memory(str(budget)),
        )  # fmt: skip
        with Engine.open(manifest, folder, config, settings) as engine:
            placed = engine.info.placement.on_device
            assert placed is not None
            assert (placed.inside, placed.slots) == (False, slots)
            assert [tokens(engine, prompt) for prompt in PROMPTS] == expected
            assert engine.store.idle
            on_a_gpu.check_promise(engine, None)
