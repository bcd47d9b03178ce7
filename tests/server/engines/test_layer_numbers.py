"""Test that each row of experts has the number that its layer has in the checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moeinf.models.families import family_of
from moeinf.runtime.checkpoints.checkpoint import CONFIG, open_checkpoint, read_json
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.library.library import Library
from moeinf.server.engines.layer_numbers import layer_numbers
from scripts.make_checkpoint import byte_tokenizer
from tests.conftest import pull
from tests.encoder_decoders import PAIRS, save_pair
from tests.tiny import save_tiny

NAMES = ["glm4", "qwen3-sparse-step", "nemotron", "arctic", "deepseek-v4", "switch-uneven"]
NAMES += ["qwen3-next-dense-ends", "ernie4.5-intervals", "kimi-linear", "granite-hybrid", "lfm2"]


@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    (save_pair if name in PAIRS else save_tiny)(name, folder, seed=3)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    settings = Settings(tmp_path / "home")
    manifest = pull(folder, settings, "tiny:f32")
    values = read_json(folder / CONFIG)
    family = family_of(values)
    config = family.parse(values)
    rows: dict[int, int] = {}
    for tensor in open_checkpoint(folder).tensors:
        part = family.expert(tensor, config) or family.fused(tensor, config)
        number = re.search(r"(?:layers|block)\.(\d+)\.", tensor)
        if part is not None and number is not None:
            rows[part.layer] = int(number[1])
    with Engine.open(
        manifest, Library(settings).folder(manifest.model), EngineConfig(), settings
    ) as engine:
        assert layer_numbers(engine) == [rows[row] for row in range(manifest.layers)]
