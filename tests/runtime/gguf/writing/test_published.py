"""Every dense tensor of a published config has a place in the file that we would export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeinf.models.families import family_of
from moeinf.runtime.checkpoints.inventory import WantedParts
from moeinf.runtime.gguf.writing.architectures import written
from moeinf.runtime.gguf.writing.names import places

_CONFIGS = json.loads((Path(__file__).parents[3] / "data" / "configs.json").read_text("utf-8"))
_REFUSED = ("nllb-moe", "switch_transformers", "phimoe")  # no decoder; a window not in llama.cpp
_GROUPS = "deepseek-ai/DeepSeek-V2-Chat"  # llama.cpp ignores its groups of experts
NAMES = [
    name
    for name, values in _CONFIGS.items()
    if values["model_type"] not in _REFUSED and name != _GROUPS
]


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_has_a_place(name: str) -> None:
    values = _CONFIGS[name]
    family = family_of(values)
    config, wanted = family.parse(values), WantedParts()
    family.build(config, wanted)
    about = written(family.model_type, config)
    found = [
        place.name
        for tensor, shape in wanted.shapes.items()
        for place in places(tensor, shape, about)
    ]
    assert len(set(found)) == len(found) >= len(wanted.shapes)
    assert set(about.tables) == set(wanted.tables)
