"""Checkpoints as published of models that also see: the text part deeper, the rest left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeinf.models.base import ExpertPart, FusedPart
from moeinf.models.families import family_of
from moeinf.runtime.checkpoints.checkpoint import open_checkpoint
from moeinf.runtime.checkpoints.inventory import take_inventory
from tests.fakes import from_tensors
from tests.models.conftest import Pair

# tiny configuration -> model_type, names of other tensors, keys beside text_config
PUBLISHED: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "gemma4": (
        "gemma4",
        [
            "vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight",
            "vision_tower.encoder.layers.0.mlp.experts.0.up_proj.weight",
            "vision_tower.patch_embedder.position_embedding_table",
            "embed_vision.embedding_projection.weight",
            "audio_tower.layers.0.self_attn.q_proj.weight",
            "embed_audio.embedding_projection.weight",
        ],
        {"audio_config": None, "vision_config": {"model_type": "gemma4_vision"}},
    ),
    "qwen4": (
        "qwen4_exp",
        ["visual.blocks.0.attn.qkv.weight", "visual.blocks.0.mlp.experts.0.up_proj.weight"],
        {"vision_config": {"model_type": "qwen4_exp"}},
    ),
}
INNER = "model.language_model."


def save_published(name: str, pair: Pair, folder: Path) -> None:
    """Write the tiny checkpoint of a text model with the names and keys of the whole one."""
    model_type, aside, keys = PUBLISHED[name]
    text = json.loads((pair.folder / "config.json").read_text())
    whole = {"model_type": model_type, "text_config": text, **keys}
    whole["tie_word_embeddings"] = text.get("tie_word_embeddings", name == "gemma4")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(whole))
    tensors = {
        (INNER + one.removeprefix("model.") if one.startswith("model.") else one): tensor
        for one, tensor in load_file(pair.folder / "model.safetensors").items()
    }
    others = {f"model.{one}": torch.ones(3, 2) for one in aside}
    save_file(tensors | others, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_the_logits_are_those_of_the_text_part(
    name: str, make_pair: Callable[[str], Pair], tmp_path: Path
) -> None:
    pair = make_pair(name)
    save_published(name, pair, tmp_path / "x")
    values = json.loads((tmp_path / "x" / "config.json").read_text())
    ours = from_tensors(values, load_file(tmp_path / "x" / "model.safetensors"))
    assert ours.unused == set()
    found = ours.model.extend([(pair.ids, ours.model.new_state(60))], ours.experts, "all")
    pair.assert_close(found)


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_a_pull_finds_every_tensor(
    name: str, make_pair: Callable[[str], Pair], tmp_path: Path
) -> None:
    pair = make_pair(name)
    save_published(name, pair, tmp_path / "x")
    whole, text = (open_checkpoint(folder) for folder in (tmp_path / "x", pair.folder))
    found, plain = (take_inventory(family_of(one.config), one) for one in (whole, text))
    assert found.unused == []
    assert found.experts.keys() == plain.experts.keys()
    assert len(found.dense) == len(plain.dense)
    stem = "layers.0.ple.ple_embedding.ngram_embedding"
    assert list(plain.tables) == ([f"model.{stem}"] if name == "qwen4" else [])
    assert list(found.tables) == ([f"{INNER}{stem}"] if name == "qwen4" else [])
    for parts, theirs in zip(found.tables.values(), plain.tables.values(), strict=True):
        assert [part.name for part in parts] == [
            f"{INNER}{stem}.shard_{n}.weight" for n in range(4)
        ]
        assert [part.shape for part in parts] == [part.shape for part in theirs]


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_names_of_experts(name: str, make_pair: Callable[[str], Pair]) -> None:
    model_type, aside, _ = PUBLISHED[name]
    text = json.loads((make_pair(name).folder / "config.json").read_text())
    values = {"model_type": model_type, "text_config": text, "tie_word_embeddings": True}
    family, mlp = family_of(values), "" if name == "gemma4" else "mlp."
    config = family.parse(values)
    stem = f"{INNER}layers.2.{mlp}experts"
    assert family.fused(f"{stem}.gate_up_proj", config) == FusedPart(2, "gate_up")
    assert family.fused(f"{stem}.down_proj", config) == FusedPart(2, "down")
    assert family.expert(f"{stem}.5.up_proj.weight", config) == ExpertPart(2, 5, "up")
    for one in aside:
        assert family.ignores(f"model.{one}", config)
        assert family.expert(f"model.{one}", config) is None
        assert family.fused(f"model.{one}", config) is None
    assert not family.ignores(f"{INNER}norm.weight", config)
    assert family.ignores("lm_head.weight", config)  # tied
