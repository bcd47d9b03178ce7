"""Checkpoints of 8-bit floats in blocks: equal to the model of their widened weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moeinf.models.families import family_of
from moeinf.runtime.checkpoints.checkpoint import (
    BadCheckpoint,
    SourceTensor,
    open_checkpoint,
    read_header,
)
from moeinf.runtime.checkpoints.encode import encoded
from moeinf.runtime.checkpoints.inventory import take_inventory
from moeinf.runtime.checkpoints.quantised.fp8 import join_scales
from moeinf.runtime.config import Settings
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.repacking.repack import repack
from moeinf.runtime.names import parse_name
from scripts.make_checkpoint import byte_tokenizer
from tests.conftest import ignore, pull
from tests.scattered import OneByOne, split_scales
from tests.tiny import save_tiny

BLOCK = [8, 16]  # does not divide the matrices' sides
FLOATS = ("_proj.weight", ".wq_b.weight", ".wk.weight")  # the indexers' too
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": BLOCK}


def quantise(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the 8-bit weights, their scales and the widened weights, element by element."""
    rows, columns = weight.shape
    scales = torch.zeros(-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
    raw = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
    meaning = torch.zeros(rows, columns)
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            at = (
                slice(i * BLOCK[0], (i + 1) * BLOCK[0]),
                slice(j * BLOCK[1], (j + 1) * BLOCK[1]),
            )
            scales[i, j] = weight[at].abs().max() / 448
            raw[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
            meaning[at] = raw[at].float() * scales[i, j]
    return raw, scales, meaning


def save_fp8(folder: Path) -> dict[str, Tensor]:
    """Convert the tiny deepseek_v32 to 8 bits; return its widened weights."""
    save_tiny("v32", folder)
    tensors, meaning = load_file(folder / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        meaning[name] = tensor
        if name.endswith(FLOATS) and not name.endswith("weights_proj.weight"):
            raw, scales, meaning[name] = quantise(tensor)
            tensors |= {name: raw, f"{name}_scale_inv": scales}
    save_file(tensors, folder / "model.safetensors")
    write_config(folder, quantization_config=FP8)
    return meaning


def write_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def read(tensor: SourceTensor, dtype: str, as_torch: torch.dtype) -> Tensor:
    parts = bytearray().join(encoded(tensor, dtype))
    return torch.frombuffer(parts, dtype=as_torch).view(tensor.shape)


def test_every_weight_is_widened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meaning = save_fp8(tmp_path)
    monkeypatch.setattr(
        "moeinf.runtime.checkpoints.quantised.fp8._ITEMS", 200
    )  # a few rows at a time
    checkpoint = open_checkpoint(tmp_path)
    found = take_inventory(family_of(checkpoint.config), checkpoint)
    assert found.unused == []
    tensors = [*found.dense.values(), *(t for e in found.experts.values() for t in e.values())]
    assert {tensor.name for tensor in tensors} == set(meaning)
    assert sum(tensor.scales is not None for tensor in tensors) > 20
    for tensor in tensors:
        assert torch.equal(read(tensor, "F32", torch.float32), meaning[tensor.name])
        rounded = meaning[tensor.name].to(torch.bfloat16)
        assert torch.equal(read(tensor, "BF16", torch.bfloat16), rounded)


def test_blocks_are_bounded(tmp_path: Path) -> None:
    """2048 × 1024 weights: two blocks of 2^20, each widened to 4 MiB."""
    weight = torch.randn(2048, 1024).to(torch.float8_e4m3fn)
    scales = torch.rand(256, 64)
    save_file({"w": weight, "w_scale_inv": scales}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    tensor = join_scales(open_checkpoint(tmp_path))["w"]
    assert [len(block) for block in encoded(tensor, "F32")] == [4 << 20, 4 << 20]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"weight_block_size": None}, "has no weight_block_size"),
        ({"weight_block_size": [8]}, "has no weight_block_size"),
        ({"weight_block_size": [0, 16]}, "has no weight_block_size"),
        ({"weight_block_size": [16, 16]}, "of a float format"),
        ({"fmt": "e5m2"}, "fmt 'e5m2'"),
    ],
)
def test_configs_that_do_not_fit(changes: Any, problem: str, tmp_path: Path) -> None:
    save_fp8(tmp_path)
    write_config(tmp_path, quantization_config={**FP8, **changes})
    with pytest.raises(BadCheckpoint, match=problem):
        join_scales(open_checkpoint(tmp_path))


def test_scales_that_are_not_there(tmp_path: Path) -> None:
    save_fp8(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    del tensors[f"{name}_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=f"{name}' has no scales"):
        join_scales(open_checkpoint(tmp_path))


def test_scales_in_other_files(tmp_path: Path) -> None:
    """The shards are the same; weights wait for their scales."""
    save_fp8(tmp_path / "one")
    byte_tokenizer().save(str(tmp_path / "one" / "tokenizer.json"))
    shutil.copytree(tmp_path / "one", tmp_path / "four")
    split_scales(tmp_path / "four", "_scale_inv")
    settings = Settings(tmp_path / "home")
    whole = pull(tmp_path / "one", settings, "one:q8")
    source = OneByOne(open_checkpoint(tmp_path / "four"), "four")
    parts = repack(source, Library(settings), parse_name("four:q8"), ignore, ignore)
    assert [(f.path, f.sha256) for f in parts.files] == [(f.path, f.sha256) for f in whole.files]
    assert source.most == 3  # either m or n waits for z
    assert source.here == set()


def test_a_pull_writes_what_the_weights_mean(tmp_path: Path) -> None:
    meaning = save_fp8(tmp_path / "fp8")
    shutil.copytree(tmp_path / "fp8", tmp_path / "wide")
    save_file(meaning, tmp_path / "wide" / "model.safetensors")
    write_config(tmp_path / "wide", quantization_config=None)
    weights = []
    for name in ("fp8", "wide"):
        byte_tokenizer().save(str(tmp_path / name / "tokenizer.json"))
        manifest = pull(tmp_path / name, Settings(tmp_path / "home"), f"{name}:f32")
        weights.append({f.path: f.sha256 for f in manifest.files if f.path.endswith("tensors")})
    assert len(weights[0]) == 17  # dense, and 8 experts in each of 2 layers
    assert weights[0] == weights[1]


@pytest.mark.parametrize("form", ["Q8", "Q4"])
def test_quantised_as_the_wide_weights_are(form: str, tmp_path: Path) -> None:
    raw, scales, meaning = quantise(torch.randn(40, 64))
    save_file({"w": raw, "w_scale_inv": scales}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    save_file({"w": meaning}, tmp_path / "wide.safetensors")
    tensor = join_scales(open_checkpoint(tmp_path))["w"]
    wide = read_header(tmp_path / "wide.safetensors")["w"]
    assert b"".join(encoded(tensor, form)) == b"".join(encoded(wide, form))


def test_what_only_chooses_experts_keeps_all_bits(tmp_path: Path) -> None:
    save_tiny("deepseek-v3", tmp_path)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    settings = Settings(tmp_path / "home")
    manifest = pull(tmp_path, settings, "tiny:bf16")
    source = load_file(tmp_path / "model.safetensors")
    stored = load_file(Library(settings).folder(manifest.model) / "dense.safetensors")
    for layer in (1, 2):
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        assert torch.equal(stored[name], source[name])
    assert stored["model.norm.weight"].dtype == torch.bfloat16
