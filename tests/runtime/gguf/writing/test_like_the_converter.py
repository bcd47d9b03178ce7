"""Files that we export have the keys and tensors of llama.cpp's converter, and are read back."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from moeinf.models.families import family_of
from moeinf.runtime.checkpoints.checkpoint import open_checkpoint
from moeinf.runtime.gguf.checkpoint import open_gguf
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from tests.exported import exported
from tests.gguf_files import write_gguf
from tests.runtime.gguf.test_architectures import KIMI, MIMO, READ_AS, stored, without_more_tokens
from tests.tiny import save_tiny
from tests.tiny_configs import TINY
from tests.tiny_families import Tiny

# llama.cpp's converter writes these, and no program needs them.
UNUSED = ("rope.scaling.finetuned", "expert_group_count", "expert_group_used_count")
UNUSED += ("glm4moe.rope.dimension_sections",)  # of pictures
TINIES: dict[str, Tiny] = {
    **{
        name: TINY[name]
        for name in (
            "minimax-m2",
            "ernie4.5",
            "hunyuan-all-experts",
            "exaone",
            "solar",
            "laguna",
            "lfm2",
            "granite-hybrid",
            "nemotron",
            "mistral4-all-experts",
            "v32",
            "glm-dsa",
            "gemma4",
            "gemma4-all-experts",
            "kimi-k2",
            "kimi-k25",
            "glm4v",
        )
    },
    "dots1": TINY["dots1-all-experts"].but(num_key_value_heads=4),
    "kimi-linear": KIMI,
    "mimo": MIMO,
    "nemotron-latent": TINY["nemotron-latent"].but(mlp_bias=False),
    "qwen3-next": TINY["qwen3-next"].but(linear_value_head_dim=6),
}
EXPORTED = {name: tiny.but(vocab_size=272) for name, tiny in TINIES.items()}


def full(names: list[str]) -> list[Any]:
    return [names[0], *(pytest.param(name, marks=pytest.mark.full) for name in names[1:])]


@pytest.mark.parametrize("name", full(list(EXPORTED)))
def test_exported_files(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    save_tiny(EXPORTED[name], folder, seed=3)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_CHECKPOINT / file, folder)
    ours = exported(folder, tmp_path, "f32").file
    held_against(ours, write_gguf(folder, tmp_path / "theirs.gguf"))
    checkpoint = without_more_tokens(open_checkpoint(folder))
    again, family = open_gguf(ours), family_of(checkpoint.config)
    assert family_of(again.config).model_type == READ_AS.get(family.model_type, family.model_type)
    assert family_of(again.config).parse(again.config) == family.parse(checkpoint.config)
    assert_near(stored(again), stored(checkpoint))


def held_against(ours: Path, theirs: Path) -> None:
    """Assert that a file has every tensor and every key of another."""
    mine, others = GGUFReader(ours), GGUFReader(theirs)
    values = [dict(halved(reader)) for reader in (mine, others)]
    assert values[0].keys() == values[1].keys()
    for name, data in values[1].items():
        assert data.squeeze().shape == values[0][name].squeeze().shape, name
    assert_near(*({name: data.tobytes() for name, data in side.items()} for side in values))
    keys = [{name: field.contents() for name, field in r.fields.items()} for r in (mine, others)]
    for name, value in keys[1].items():
        if name.startswith(("general.", "tokenizer.", "GGUF.")) or name.endswith(UNUSED):
            continue
        if name.endswith(".feed_forward_length") and name not in keys[0]:  # no layer is dense
            continue
        if isinstance(value, str):
            assert keys[0][name] == value, name
        else:  # a list of booleans may be one of numbers
            found = np.array(keys[0][name], np.float64)
            np.testing.assert_allclose(found, np.array(value, np.float64), 1e-6, err_msg=name)


def halved(reader: GGUFReader) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a file; llama.cpp also reads gate and up of experts in one."""
    for tensor in reader.tensors:
        data = np.array(tensor.data)
        if ".ffn_gate_up_exps." in tensor.name:
            for role, half in zip(("gate", "up"), np.split(data, 2, 1), strict=True):
                yield tensor.name.replace("gate_up", role), half
        else:
            yield tensor.name, data


def assert_near(ours: Mapping[str, bytes], theirs: Mapping[str, bytes]) -> None:
    """Assert equal values; norms plus 1 and decay rates are rounded."""
    assert ours.keys() == theirs.keys()
    for name, data in theirs.items():
        found = np.frombuffer(ours[name], np.float32)
        np.testing.assert_allclose(found, np.frombuffer(data, np.float32), 0, 1e-6, err_msg=name)
