"""NVFP4 in both spellings, and 8-bit floats beside it: equal to the model of their weights."""

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
from moeinf.offload.format.quantise import dequantise, quantise
from moeinf.runtime.checkpoints.checkpoint import QUANTISED, BadCheckpoint, open_checkpoint
from moeinf.runtime.checkpoints.encode import encoded
from moeinf.runtime.checkpoints.finite import NotFiniteWeights
from moeinf.runtime.checkpoints.inventory import take_inventory
from moeinf.runtime.checkpoints.quantised.joining import joined
from moeinf.runtime.checkpoints.quantised.nvfp4 import Rows, nvfp4_rows
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.hub.resolve import find_source
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.repacking.repack import repack
from moeinf.runtime.library.sources import LocalSource
from moeinf.runtime.names import parse_name
from tests.conftest import ignore, pull
from tests.scattered import OneByOne, split_scales
from tests.tiny_packed import Packer, compressed, floats, nvfp4, save_packed

FLOAT4 = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
SPELLINGS: dict[bool, dict[str, Any]] = {
    False: {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    True: compressed(FLOAT4, form="nvfp4-pack-quantized"),
}
UP = "model.layers.0.mlp.experts.2.up_proj.weight"


def save(folder: Path, divides: bool = False) -> dict[str, Tensor]:
    """Write a checkpoint whose experts are NVFP4, with the factors of activations beside them."""
    pack = nvfp4(divides)
    meaning = save_packed(
        folder, SPELLINGS[divides], lambda n: pack if ".experts." in n else None, "qwen3_moe"
    )
    path = folder / "model.safetensors"
    tensors = load_file(path)
    end = "input_global_scale" if divides else "input_scale"
    aside = {f"{name.removesuffix('weight')}{end}": torch.ones(1) for name in meaning}
    aside["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(())
    save_file(tensors | aside, path, {"format": "pt"})
    return meaning


def change(folder: Path, **changes: Tensor | None) -> None:
    """Set or remove the tensors UP + _<key>."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for key, tensor in changes.items():
        name = UP + {"weight": "", "packed": "_packed"}.get(key, f"_{key}")
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("divides", [False, True])
def test_every_weight_is_widened(divides: bool, tmp_path: Path) -> None:
    meaning = save(tmp_path / "x", divides)
    tensors = joined(open_checkpoint(tmp_path / "x"))
    for name, wide in meaning.items():
        found = {form: bytearray().join(encoded(tensors[name], form)) for form in ("F32", "BF16")}
        assert torch.equal(torch.frombuffer(found["F32"], dtype=torch.float32), wide.view(-1))
        rounded = torch.frombuffer(found["BF16"], dtype=torch.bfloat16)
        assert torch.equal(rounded, wide.bfloat16().view(-1))


@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("tag", ["f32", "q8", "q4"])
def test_a_pull_writes_what_the_weights_mean(divides: bool, tag: str, tmp_path: Path) -> None:
    save(tmp_path / "x", divides)
    weights, notes = [], []
    library = Library(Settings(tmp_path / "home"))
    for name in ("x", "x-wide"):
        source = LocalSource(open_checkpoint(tmp_path / name), name)
        manifest = repack(source, library, parse_name(f"{name}:{tag}"), ignore, notes.append)
        weights.append({f.path: f.sha256 for f in manifest.files if f.path.endswith("tensors")})
    assert len(weights[0]) == 15
    assert weights[0] == weights[1]
    assert ["NVFP4 (4.5 bits" in note for note in notes] == [True] * (tag != "f32")


@pytest.mark.parametrize("divides", [False, True])
def test_its_own_tag_is_the_default(divides: bool, tmp_path: Path) -> None:
    save(tmp_path / "x", divides)
    settings = Settings(tmp_path / "home")
    assert str(find_source(str(tmp_path / "x"), None, settings, ignore)[0]) == "x:nvfp4"
    assert str(find_source(str(tmp_path / "x"), "y:q4", settings, ignore)[0]) == "y:q4"


def test_its_own_tag_is_the_default_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    snapshot = cache / "models--Org--Small/snapshots" / ("0" * 40)
    save(snapshot)
    (cache / "models--Org--Small/refs").mkdir()
    (cache / "models--Org--Small/refs/main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("moeinf.runtime.hub.resolve.is_offline", lambda: True)
    settings = Settings(tmp_path / "home")
    for asked, tag in (("Org/Small", "nvfp4"), ("Org/Small:q8", "q8")):
        for name in (None, "y"):
            assert find_source(asked, name, settings, ignore)[0].tag == tag


@pytest.mark.parametrize("divides", [False, True])
def test_tiles_of_its_own(divides: bool, tmp_path: Path) -> None:
    """Codes and scales stay; a divisor becomes a factor, which is rounded once."""
    meaning, notes = save(tmp_path / "x", divides), ["first"]
    source = LocalSource(open_checkpoint(tmp_path / "x"), "x")
    library = Library(Settings(tmp_path / "home"))
    manifest = repack(source, library, parse_name("x:nvfp4"), ignore, notes.append)
    assert (manifest.dtype, notes) == ("NVFP4", ["first"])
    tensors = joined(open_checkpoint(tmp_path / "x"))
    for name, wide in meaning.items():
        data = bytearray().join(encoded(tensors[name], "NVFP4"))
        tiles = torch.frombuffer(data, dtype=torch.uint8)
        found = dequantise(tiles, "NVFP4", *wide.shape)
        assert torch.allclose(found, wide, rtol=2e-7 if divides else 0, atol=0)
    folder = library.folder(manifest.model)
    with Engine.open(manifest, folder, EngineConfig(), Settings(tmp_path / "home")) as engine:
        assert str(engine.info.name) == "x:nvfp4"


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "qwen3_5_moe"])
def test_the_families_that_people_publish(family: str, tmp_path: Path) -> None:
    """Layers of multi-token prediction may be in a form that is not read."""
    pack = nvfp4(divides=False)
    meaning = save_packed(
        tmp_path / "x", SPELLINGS[False], lambda n: pack if ".experts." in n else None, family
    )
    path, last = tmp_path / "x" / "model.safetensors", {"qwen3_5_moe": "mtp.layers.0"}
    tensors = load_file(path)
    layers = 1 + max(int(name.split(".")[2]) for name in tensors if ".layers." in name)
    extra = f"{last.get(family, f'model.layers.{layers}')}.mlp.experts.0.up_proj.weight"
    save_file(tensors | {extra: bytes_of(3, 5)}, path, {"format": "pt"})
    weights = []
    for name in ("x", "x-wide"):
        manifest = pull(tmp_path / name, Settings(tmp_path / "home"), f"{name}:q8")
        weights.append({f.path: f.sha256 for f in manifest.files if f.path.endswith("tensors")})
    assert len(meaning) == 3 * (len(weights[0]) - 1)
    assert weights[0] == weights[1]


def test_the_stored_parts_mean_the_weights(tmp_path: Path) -> None:
    """The seam for tiles: nothing is rounded but the product with the factor."""
    meaning = save(tmp_path / "x")
    (rows,) = nvfp4_rows(joined(open_checkpoint(tmp_path / "x"))[UP])
    assert (rows.codes.shape, rows.scales.shape) == ((64, 64), (64, 4))
    assert torch.equal(rows.scales.to(torch.float8_e4m3fn).float(), rows.scales)
    assert torch.equal(rows.widened(), meaning[UP])
    tiny = Rows(torch.tensor([[2] * 16], dtype=torch.uint8), torch.ones(1, 1), 4.0, divides=True)
    assert tiny.widened().tolist() == [[0.25] * 16]


def test_scales_in_other_files(tmp_path: Path) -> None:
    save(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "four")
    split_scales(tmp_path / "four", "_scale_2")
    settings = Settings(tmp_path / "home")
    whole = pull(tmp_path / "one", settings, "one:q8")
    source = OneByOne(open_checkpoint(tmp_path / "four"), "four")
    parts = repack(source, Library(settings), parse_name("four:q8"), ignore, ignore)
    assert [(f.path, f.sha256) for f in parts.files] == [(f.path, f.sha256) for f in whole.files]
    assert source.here == set()


def test_only_modelopts_own_file_names_the_method(tmp_path: Path) -> None:
    save(tmp_path / "x")
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "x" / "config.json").write_text(json.dumps(config))
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / "x" / QUANTISED).write_text(json.dumps(beside))
    assert joined(open_checkpoint(tmp_path / "x"))[UP].dtype == "NVFP4"


FLOATS: dict[str, Packer] = {
    "per tensor": floats(lambda rows, columns: ()),
    "per tensor, a list": floats(lambda rows, columns: (1,)),
    "per row": floats(lambda rows, columns: (rows, 1)),
    "per row, a list": floats(lambda rows, columns: (rows,)),
    "per block": floats(lambda rows, columns: (-(-rows // 16), -(-columns // 16)), 16),
}


@pytest.mark.parametrize("how", FLOATS)
@pytest.mark.parametrize("divides", [False, True])
def test_eight_bits_beside_four(how: str, divides: bool, tmp_path: Path) -> None:
    """Attention has 8 bits, most experts 4, two matrices are plain."""

    def choose(name: str) -> Packer | None:
        if "self_attn.o_proj" in name:
            return None
        return FLOATS[how] if ".self_attn." in name else nvfp4(divides)

    section = {**SPELLINGS[False], "quant_algo": "MIXED_PRECISION"}
    if divides:
        eight = {"targets": ["Linear"], "format": "float-quantized", "weights": {"num_bits": 8}}
        section = {**SPELLINGS[True], "format": "mixed-precision"}
        four = {**section["config_groups"]["group_0"], "format": "nvfp4-pack-quantized"}
        section["config_groups"] = {"group_0": four, "group_1": eight}
    meaning = save_packed(tmp_path / "x", section, choose, "qwen3_moe")
    checkpoint = open_checkpoint(tmp_path / "x")
    inventory = take_inventory(family_of(checkpoint.config), checkpoint)
    assert inventory.unused == []
    dtypes = {name: tensor.dtype for name, tensor in joined(checkpoint).items()}
    assert dtypes["model.layers.0.self_attn.q_proj.weight"] == "F8_E4M3"
    assert dtypes["model.layers.0.self_attn.o_proj.weight"] == "F32"
    for name, wide in meaning.items():
        found = bytearray().join(encoded(joined(checkpoint)[name], "F32"))
        assert torch.equal(torch.frombuffer(found, dtype=torch.float32), wide.view(-1)), name
        tiles = bytearray().join(encoded(joined(checkpoint)[name], "Q4"))
        assert tiles == quantise(wide, "Q4").numpy().tobytes(), name


def not_finite_codes() -> Tensor:
    return torch.full((64, 4), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)  # NaN


@pytest.mark.parametrize(
    "changes",
    [
        {"scale": not_finite_codes()},
        {"scale_2": torch.tensor(float("nan"))},
        {"scale_2": torch.tensor(float("inf"))},
    ],
)
def test_nan_and_infinity_in_scales(changes: dict[str, Tensor], tmp_path: Path) -> None:
    save(tmp_path / "x")
    change(tmp_path / "x", **changes)
    with pytest.raises(NotFiniteWeights, match="up_proj"):
        pull(tmp_path / "x", Settings(tmp_path / "home"), "x:q8")


def test_a_divisor_of_zero(tmp_path: Path) -> None:
    save(tmp_path / "x", divides=True)
    change(tmp_path / "x", global_scale=torch.zeros(1))
    with pytest.raises(NotFiniteWeights, match="up_proj"):
        pull(tmp_path / "x", Settings(tmp_path / "home"), "x:q8")


def bytes_of(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def eight_bits(*shape: int) -> Tensor:
    return torch.zeros(shape).to(torch.float8_e4m3fn)


HOSTILE: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "no scales": ({"scale": None}, "has no weight_scale"),
    "no factor": ({"scale_2": None}, "has no weight_scale_2"),
    "scales of 32 weights": ({"scale": eight_bits(64, 2)}, "one per 16"),
    "scales of bf16": ({"scale": torch.ones(64, 4).bfloat16()}, "F8_E4M3, one per 16"),
    "a factor per row": ({"scale_2": torch.ones(64)}, "not one F32"),
    "a factor of bf16": ({"scale_2": torch.ones(()).bfloat16()}, "not one F32"),
    "few codes": ({"weight": bytes_of(64, 30)}, "one per 16"),
    "no codes": ({"weight": bytes_of(64, 0)}, "not a matrix"),
    "stacked codes": ({"weight": bytes_of(2, 64, 32)}, "not a matrix"),
    "half a group": ({"weight": bytes_of(64, 4), "scale": eight_bits(64, 0)}, "one per 16"),
    "other sizes": (
        {"weight": bytes_of(32, 32), "scale": eight_bits(32, 4)},
        "the config says",
    ),
    "packed ones beside": ({"packed": bytes_of(64, 32)}, "has no weight_"),
    "8 bits, odd scales": ({"weight": eight_bits(64, 64), "scale": torch.ones(7)}, "not a float"),
    "8 bits, scales that no block has": (
        {"weight": eight_bits(64, 64), "scale": torch.ones(48, 1)},
        "one per block",
    ),
    "scaled inputs": ({"packed": None}, "scaled inputs"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_tensors_that_do_not_fit(name: str, tmp_path: Path) -> None:
    save(tmp_path / "x")
    changes, problem = HOSTILE[name]
    change(tmp_path / "x", **changes)
    if name == "scaled inputs":
        path = tmp_path / "x" / "model.safetensors"
        aside = {f"{UP.removesuffix('weight')}pre_quant_scale": torch.ones(64)}
        save_file(load_file(path) | aside, path, {"format": "pt"})
    checkpoint = open_checkpoint(tmp_path / "x")
    with pytest.raises(BadCheckpoint, match=problem) as caught:
        take_inventory(family_of(checkpoint.config), checkpoint)
    assert "model.safetensors" in str(caught.value)
