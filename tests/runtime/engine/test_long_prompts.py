"""Prompts across chunks: of prefill, of recurrent layers, of windows and of indexers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moeinf.runtime.config import PREFILL_CHUNK, EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.library.library import Library
from moeinf.runtime.sizes import parse_memory
from scripts.make_checkpoint import byte_tokenizer
from tests.conftest import pull
from tests.tiny import TINY, save_tiny

LENGTH, STEPS = PREFILL_CHUNK + 64 + 21, 6
NAMES = ["gemma4", "laguna", "mimo", "exaone"]  # windows
NAMES += ["qwen3-next", "kimi-linear", "nemotron", "granite-hybrid", "lfm2"]  # recurrent layers
NAMES += ["v32", "glm-dsa", "deepseek-v4"]  # an indexer
NAMES += ["qwen4", "glm5-next"]  # both of these


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_logits_after_two_chunks(name: str, tmp_path: Path) -> None:
    """Logits of the last token and of those after it, with the least memory for experts."""
    folder, settings = tmp_path / "checkpoint", Settings(tmp_path / "home")
    model = save_tiny(TINY[name].but(max_position_embeddings=512), folder, seed=3)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    manifest = pull(folder, settings, "tiny:f32")
    ids = [(11 * i + i // 7) % 97 for i in range(LENGTH + STEPS)]
    with torch.no_grad():
        expected = model(torch.tensor([ids]), use_cache=False).logits[0, LENGTH - 1 :]
    config = EngineConfig(memory=parse_memory(str(manifest.slots.min_bytes)), context=512)
    with Engine.open(
        manifest, Library(settings).folder(manifest.model), config, settings
    ) as engine:
        state = engine.new_state()
        parts = [ids[:LENGTH], *([token] for token in ids[LENGTH:])]
        found = torch.stack([torch.from_numpy(engine.extend(state, p).copy()) for p in parts])
        assert state.length == LENGTH + STEPS
    worst = float((found - expected).abs().max())
    assert worst <= 1e-3 * float(expected.abs().max())
