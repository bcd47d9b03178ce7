"""Families of 2026 on the strict fake of a GPU: logits near the CPU's, in every format.

One family for each kind of block: windows and global layers, DeltaNet, Mamba2, an indexer, and
hyper-connections with compressed attention. The prompt is longer than their windows, a chunk of
their recurrent layers and the tokens that their indexers choose.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from moeinf.runtime.engine.engine import Engine
from tests.native.fake_cuda import Fake
from tests.runtime import on_a_gpu
from tests.runtime.dense.test_dense_on_gpu import config_of
from tests.tiny import TINY

NAMES = ["gemma4", "qwen3-next", "nemotron", "glm-dsa", "deepseek-v4"]


@pytest.mark.matrix
@pytest.mark.parametrize("tag", ["q8", "q4", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_near_the_cpus(
    name: str, tag: str, fake: Fake, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    tiny = TINY[name].but(max_position_embeddings=128)
    model = on_a_gpu.installed(tiny, tag, tmp_path)
    request.getfixturevalue("strict")
    memory = str(model.manifest.slots.min_bytes)
    config = config_of(fake, model.manifest, None, memory, "auto", 128)
    with Engine.open(model.manifest, model.folder, config, model.settings) as engine:
        placed = engine.info.placement.on_device
        assert placed is not None
        assert placed.inside
        found = on_a_gpu.answered(engine, model.expected.tokens)
    assert len(found.logits) == on_a_gpu.STEPS + 1
    on_a_gpu.near(found.logits, model.expected.logits)
