"""Classify the tensors of a checkpoint: per expert, fused, missing, wrong shape."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as changed
from safetensors.torch import load_file, save_file

from moeinf.models.base import Family, FusedPart
from moeinf.models.families import family_of
from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint, blocks, open_checkpoint
from moeinf.runtime.checkpoints.inventory import take_inventory
from moeinf.runtime.config import Settings
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from moeinf.runtime.library.repacking.repack import prospects
from moeinf.runtime.library.sources import LocalSource

FUSED = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj")


def fused_family(config: dict[str, Any]) -> Family:
    """Return the demo's family with experts that are stored fused."""
    plain = family_of(config)

    def fused(name: str, _config: Any) -> FusedPart | None:
        match = FUSED.fullmatch(name)
        role: Any = match[2] if match else None
        return FusedPart(int(match[1]), role) if match else None

    return replace(plain, fused=fused)


def fuse(folder: Path) -> None:
    """Write the demo with one tensor [E, 2F, D] and one [E, D, F] per layer."""
    tensors = load_file(DEMO_CHECKPOINT / "model.safetensors")
    parts: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    dense = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if match:
            parts[f"{match[1]}.{match[3]}"][int(match[2])] = tensor
        else:
            dense[name] = tensor
    for key in [key for key in parts if key.endswith(".gate")]:
        base = key.removesuffix(".gate")
        gate, up, down = (torch.stack([parts[f"{base}.{r}"][e] for e in range(32)])
                          for r in ("gate", "up", "down"))  # fmt: skip
        dense[f"{base}.gate_up_proj"] = torch.cat((gate, up), 1)
        dense[f"{base}.down_proj"] = down
    save_file(dense, folder / "model.safetensors")
    (folder / "config.json").write_text((DEMO_CHECKPOINT / "config.json").read_text())


def test_fused_experts_are_the_same_bytes(tmp_path: Path) -> None:
    fuse(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    found = take_inventory(fused_family(config), open_checkpoint(tmp_path))
    plain = take_inventory(family_of(config), open_checkpoint(DEMO_CHECKPOINT))
    assert set(found.experts) == set(plain.experts)
    assert not found.unused
    for key, roles in plain.experts.items():
        for role, tensor in roles.items():
            piece = found.experts[key][role]
            assert piece.shape == tensor.shape
            assert b"".join(blocks(piece, "BF16")) == b"".join(blocks(tensor, "BF16"))


def test_fused_experts_of_another_shape(tmp_path: Path) -> None:
    fuse(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"intermediate_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadCheckpoint, match="the config says"):
        take_inventory(fused_family(config), open_checkpoint(tmp_path))


def test_a_family_without_fused_experts_says_so(tmp_path: Path) -> None:
    fuse(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="not the way this family stores an expert"):
        take_inventory(family_of(checkpoint.config), checkpoint)


def test_downcasts_and_strangers(tmp_path: Path) -> None:
    tensors = load_file(DEMO_CHECKPOINT / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    tensors["model.something.new"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((DEMO_CHECKPOINT / "config.json").read_text())
    checkpoint = open_checkpoint(tmp_path)
    found = take_inventory(family_of(checkpoint.config), checkpoint)
    assert found.unused == ["model.something.new"]
    assert found.downcasts("BF16")
    assert not found.downcasts("F32")


@pytest.mark.parametrize("tag", ["bf16", "f32"])
def test_the_prospect_of_a_model_is_its_manifest_without_files(tag: str, demo_home: Path) -> None:
    manifest, _ = Library(Settings(demo_home)).read(f"demo:{tag}")
    source = LocalSource(open_checkpoint(DEMO_CHECKPOINT), manifest.source)
    found = prospects(source, manifest.model)[manifest.tag]
    assert found.dense_bytes == manifest.file("dense.safetensors").data_bytes
    assert changed(found, created_at="") == changed(manifest, files=(), created_at="")
