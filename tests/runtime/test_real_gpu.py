"""The demo on a real GPU, against the CPU; skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moeinf.offload.split import MISSES, Miss
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.device_plan import CODE_BYTES, CONTEXT_BYTES, workspace_bytes
from moeinf.runtime.engine import Engine
from moeinf.runtime.gpu import Gpu, find_gpu
from moeinf.runtime.library import Library
from moeinf.runtime.sizes import parse_memory
from tests.conftest import Open
from tests.runtime.test_engine import PROMPTS, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize("miss", MISSES)
@pytest.mark.parametrize("slots", [4, 60, 192])
def test_the_cpus_tokens(
    slots: int, miss: Miss, demo_home: Path, tmp_path: Path, open_engine: Open
) -> None:
    """Up to 16 rows an expert's kernels have the CPU's bits."""
    expected = [tokens(open_engine(), prompt) for prompt in PROMPTS]
    (tmp_path / "models").symlink_to(demo_home / "models")
    settings = Settings(tmp_path)
    manifest, folder = Library(settings).read("demo")
    gpu = find_gpu()
    assert isinstance(gpu, Gpu)
    own = CONTEXT_BYTES if gpu.context_bytes is None else gpu.context_bytes + CODE_BYTES
    budget = own + workspace_bytes(manifest) + slots * manifest.slots.slot_bytes
    config = EngineConfig(
        memory=parse_memory("30%"), device="cuda", miss=miss,
        device_memory=parse_memory(str(budget)),
    )  # fmt: skip
    with Engine(manifest, folder, config, settings) as engine:
        assert [tokens(engine, prompt) for prompt in PROMPTS] == expected
        assert engine.store.idle
        assert engine.gpu is not None
        held = engine.gpu.promise.look()
        assert held.peak_bytes <= budget, held
