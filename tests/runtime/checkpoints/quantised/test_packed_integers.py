"""Packed integers of compressed-tensors: codes and scales are kept in tiles where they fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from moeinf.models.families import family_of
from moeinf.models.quantisation import UnsupportedQuantisation
from moeinf.offload.format.quantise import dequantise
from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint, open_checkpoint
from moeinf.runtime.checkpoints.encode import encoded
from moeinf.runtime.checkpoints.finite import NotFiniteWeights
from moeinf.runtime.checkpoints.inventory import take_inventory
from moeinf.runtime.checkpoints.quantised.joining import joined
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.library.repacking.repack import repack
from moeinf.runtime.library.sources import LocalSource
from moeinf.runtime.names import parse_name
from moeinf.runtime.sizes import parse_memory
from tests.conftest import endless, ignore, pull
from tests.generating import answering
from tests.scattered import OneByOne, split_scales
from tests.tiny_packed import change_config, compressed, integers, save_packed, scheme

EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.weight"
DOWN = EXPERT.format(3, "down")


def save(folder: Path, bits: int = 4, group: int = 32, symmetric: bool = True) -> dict[str, Tensor]:
    """Write a checkpoint like Kimi-K2-Thinking's, whose attention is packed, too."""
    pack = integers(bits, group, symmetric)
    config = compressed(scheme(bits, group, symmetric))
    return save_packed(folder, config, lambda name: pack)


def pulled(folder: Path, home: Path, name: str) -> tuple[Manifest, Path, list[str]]:
    """Pull; return the manifest, the model's folder and the notes."""
    notes: list[str] = []
    source = LocalSource(open_checkpoint(folder), str(folder))
    library = Library(Settings(home))
    manifest = repack(source, library, parse_name(name), ignore, notes.append)
    return manifest, library.folder(manifest.model), notes


def stored_weights(folder: Path, form: str, meaning: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a model's tiles, for all names of `meaning` that are tiled."""
    found, dense = {}, load_file(folder / "dense.safetensors")
    for name, wide in meaning.items():
        if name in dense:
            tiles = dense[name]
            if tiles.dtype != torch.uint8:  # kv_b_proj
                continue
        else:
            parts = name.split(".")
            shard = folder / "experts" / "L000" / f"E{int(parts[5]):03}.safetensors"
            with safe_open(shard, "pt") as file:
                tiles = file.get_tensor(parts[6].removesuffix("_proj"))
        found[name] = dequantise(tiles.contiguous(), form, *wide.shape)
    return found


@pytest.mark.parametrize(
    ("bits", "group", "tag"),
    [(4, 32, "q4"), (4, 32, "q8"), (4, 64, "q4"), (4, 0, "q4"), (8, 32, "q8"), (8, 0, "q8")],
)
def test_tiles_have_the_sources_weights(bits: int, group: int, tag: str, tmp_path: Path) -> None:
    if group == 64:  # 32 columns have no group of 64
        pack, rest = integers(bits, group), integers(bits, 32)
        config = compressed(scheme(bits, group), scheme(bits, 32))
        meaning = save_packed(
            tmp_path / "x", config, lambda name: pack if "gate_proj" in name else rest
        )
    else:
        meaning = save(tmp_path / "x", bits, group)
    _, folder, notes = pulled(tmp_path / "x", tmp_path / "home", f"x:{tag}")
    found = stored_weights(folder, tag.upper(), meaning)
    assert len(found) == len(meaning) - 2  # kv_b_proj of two layers
    for name, weights in found.items():
        assert torch.equal(weights, meaning[name]), name
    assert notes == []


@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True), (8, False)])
def test_f32_has_them_too(bits: int, symmetric: bool, tmp_path: Path) -> None:
    meaning = save(tmp_path / "x", bits, 32, symmetric)
    tensors = joined(open_checkpoint(tmp_path / "x"))
    for name, wide in meaning.items():
        data = bytearray().join(encoded(tensors[name], "F32"))
        assert torch.equal(torch.frombuffer(data, dtype=torch.float32).view(wide.shape), wide)


def test_some_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "x", 4, 32, symmetric=False)
    tensor = joined(open_checkpoint(tmp_path / "x"))[EXPERT.format(0, "down")]
    whole = b"".join(encoded(tensor, "Q4"))
    monkeypatch.setattr("moeinf.runtime.checkpoints.matrix_rows._ITEMS", 600)
    parts = [bytes(block) for block in encoded(tensor, "Q4")]
    assert len(parts) == 4  # 64 rows, in blocks of 16
    assert b"".join(parts) == whole


def test_what_does_not_fit_is_rounded_and_counted(tmp_path: Path) -> None:
    meaning = save(tmp_path / "x")
    path = tmp_path / "x" / "model.safetensors"
    tensors = load_file(path)
    scales = tensors[f"{DOWN}_scale"]
    scales[5, 0] = torch.tensor(1.3e-7).bfloat16()  # below float16's exact range
    save_file(tensors, path, {"format": "pt"})
    meaning[DOWN][5, :32] *= 0
    _, folder, notes = pulled(tmp_path / "x", tmp_path / "home", "x:q4")
    assert len(notes) == 1
    assert notes[0].startswith("rounded")
    assert notes[0].endswith(DOWN)  # and no more
    found = stored_weights(folder, "Q4", meaning)
    for name, weights in found.items():
        assert torch.equal(weights, meaning[name]) == (name != DOWN), name
    assert (found[DOWN] - meaning[DOWN]).norm() < 0.05 * meaning[DOWN].norm()


def test_zero_points_are_rounded_and_counted(tmp_path: Path) -> None:
    meaning = save(tmp_path / "x", 4, 32, symmetric=False)
    _, folder, notes = pulled(tmp_path / "x", tmp_path / "home", "x:q8")
    assert notes[0].endswith(f" and {len(meaning) - 3} more")  # kv_b_proj stays wide
    for name, weights in stored_weights(folder, "Q8", meaning).items():
        assert (weights - meaning[name]).norm() < 0.01 * meaning[name].norm(), name


def test_in_f32_it_is_transformers_token_for_token(tmp_path: Path) -> None:
    """test_quantised_families.py compares the logits of kept tiles."""
    save(tmp_path / "x")
    change_config(tmp_path / "x", model_type="kimi_k2")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "x-wide", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = [(5 * i + 1) % 97 for i in range(40)]
    with torch.no_grad():
        wanted = reference(torch.tensor([ids]), use_cache=False).logits[0]
        expected = reference.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=20, eos_token_id=None
        )[0, 40:].tolist()
    settings = Settings(tmp_path / "home")
    manifest = pull(tmp_path / "x", settings, "x:f32")
    config = EngineConfig(memory=parse_memory("100%"))
    folder = Library(settings).folder(manifest.model)
    with Engine.open(manifest, folder, config, settings) as engine:
        state = engine.new_state()
        found = engine.model.extend([(ids, state)], engine.store, "all")
        endless(engine)
        answer = answering(engine, ids, 20)
        list(answer)
    assert (found - wanted).norm() < 1e-4 * wanted.norm()
    assert answer.tokens == expected


@pytest.mark.parametrize("tag", ["q4", "bf16"])
def test_scales_in_other_files(tag: str, tmp_path: Path) -> None:
    save(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "four")
    split_scales(tmp_path / "four", "_scale")
    settings = Settings(tmp_path / "home")
    whole = pull(tmp_path / "one", settings, f"one:{tag}")
    source = OneByOne(open_checkpoint(tmp_path / "four"), "four")
    parts = repack(source, Library(settings), parse_name(f"four:{tag}"), ignore, ignore)
    assert [(f.path, f.sha256) for f in parts.files] == [(f.path, f.sha256) for f in whole.files]
    assert source.here == set()


def test_the_text_part_of_a_model_with_vision(tmp_path: Path) -> None:
    """Kimi-K2.5: names and config are one level deeper, vision is left out."""
    save(tmp_path / "text")
    shutil.copytree(tmp_path / "text", tmp_path / "vision")
    tensors = load_file(tmp_path / "text" / "model.safetensors")
    inner = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    inner |= {"vision_tower.x.weight": torch.ones(2, 3), "mm_projector.x.bias": torch.ones(2)}
    save_file(inner, tmp_path / "vision" / "model.safetensors")
    text = json.loads((tmp_path / "text" / "config.json").read_text())
    config = {"model_type": "kimi_k25", "text_config": text, "vision_config": {}}
    (tmp_path / "vision" / "config.json").write_text(json.dumps(config))
    settings = Settings(tmp_path / "home")
    one = pull(tmp_path / "text", settings, "text:q4")
    two = pull(tmp_path / "vision", settings, "vision:q4")
    weights = [
        {f.path: f.sha256 for f in manifest.files if f.path.endswith("tensors")}
        for manifest in (one, two)
    ]
    assert len(weights[0]) == 9
    assert weights[0] == weights[1]
    assert two.family == "deepseek_v3"
    del config["text_config"]
    with pytest.raises(ValueError, match="lacks text_config"):
        family_of(config).parse(config)


def test_nan_and_infinity_in_scales(tmp_path: Path) -> None:
    save(tmp_path / "x")
    path = tmp_path / "x" / "model.safetensors"
    tensors = load_file(path)
    for value in (float("nan"), float("inf")):
        tensors[f"{DOWN}_scale"][7, 0] = value
        save_file(tensors, path, {"format": "pt"})
        with pytest.raises(NotFiniteWeights, match="down_proj"):
            pull(tmp_path / "x", Settings(tmp_path / "home"), "x:q4")


HOSTILE: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "no scales": ({"_scale": None}, "has no weight_scale"),
    "few scales": ({"_scale": torch.ones(64, 3)}, "fits no group"),
    "short scales": ({"_scale": torch.ones(5, 1)}, "a float per group"),
    "whole scales": ({"_scale": torch.ones(64, 1).int()}, "a float per group"),
    "flat scales": ({"_scale": torch.ones(64)}, "a float per group"),
    "few codes": ({"_packed": torch.zeros(64, 3, dtype=torch.int32)}, "fits no group"),
    "no codes": ({"_packed": torch.zeros(64, 0, dtype=torch.int32)}, "not a matrix"),
    "codes of 64 bits": ({"_packed": torch.zeros(64, 4).long()}, "packed codes"),
    "stacked codes": ({"_packed": torch.zeros(2, 64, 4).int()}, "not a matrix"),
    "other rows": (
        {"_packed": torch.zeros(32, 4).int(), "_scale": torch.ones(32, 1)},
        "the config says",
    ),
    "a plain one beside": ({"": torch.ones(64, 32)}, "stands beside"),
    "odd zero points": ({"_zero_point": torch.zeros(64, 1).int()}, r"not \[8, 1\] I32"),
    "reordered": ({"_g_idx": torch.zeros(32).int()}, "reordered groups"),
    "a shape of three": ({"_shape": torch.ones(3).long()}, "two whole numbers"),
    "a shape of floats": ({"_shape": torch.ones(2)}, "two whole numbers"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_tensors_that_do_not_fit(name: str, tmp_path: Path) -> None:
    save(tmp_path / "x")
    changes, problem = HOSTILE[name]
    path = tmp_path / "x" / "model.safetensors"
    tensors = load_file(path)
    for end, tensor in changes.items():
        tensors.pop(DOWN + end, None)
        if tensor is not None:
            tensors[DOWN + end] = tensor
    save_file(tensors, path, {"format": "pt"})
    checkpoint = open_checkpoint(tmp_path / "x")
    with pytest.raises(BadCheckpoint, match=problem) as caught:
        take_inventory(family_of(checkpoint.config), checkpoint)
    assert "model.safetensors" in str(caught.value)


@pytest.mark.parametrize("stated", [[64, 33], [-64, 32], [32, 64], [0, 0]])
@pytest.mark.parametrize("tag", ["q4", "f32"])
def test_another_shape_is_stated(stated: list[int], tag: str, tmp_path: Path) -> None:
    save(tmp_path / "x")
    path = tmp_path / "x" / "model.safetensors"
    save_file(load_file(path) | {f"{DOWN}_shape": torch.tensor(stated)}, path, {"format": "pt"})
    with pytest.raises(BadCheckpoint, match="weight_shape' holds") as caught:
        pull(tmp_path / "x", Settings(tmp_path / "home"), f"x:{tag}")
    assert "model.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "method"),
    [
        ({"actorder": "group"}, "actorder group"),
        ({"actorder": "dynamic"}, "actorder dynamic"),
        ({"num_bits": 3}, "3 bits"),
    ],
)
def test_schemes_that_are_refused(change: dict[str, Any], method: str, tmp_path: Path) -> None:
    save(tmp_path / "x")
    change_config(tmp_path / "x", quantization_config=compressed({**scheme(), **change}))
    with pytest.raises(UnsupportedQuantisation) as caught:
        pull(tmp_path / "x", Settings(tmp_path / "home"), "x:q4")
    assert caught.value.method == f"compressed-tensors ({method})"


def test_schemes_that_leave_a_choice(tmp_path: Path) -> None:
    """One scale per row does not tell 4 bits from 8."""
    save(tmp_path / "x", 4, 0)
    both = compressed(scheme(4, 0), scheme(8, 0))
    change_config(tmp_path / "x", quantization_config=both)
    with pytest.raises(BadCheckpoint, match="fits several groups"):
        joined(open_checkpoint(tmp_path / "x"))
