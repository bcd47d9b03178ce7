"""DeepSeek-V4's release: FP8 blocks with powers of 2 as scales, and experts in FP4."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from moeinf.models.base import ModelDataError
from moeinf.models.families import family_of
from moeinf.runtime.checkpoints.checkpoint import (
    QUANTISED,
    BadCheckpoint,
    SourceTensor,
    open_checkpoint,
)
from moeinf.runtime.checkpoints.encode import encoded
from moeinf.runtime.checkpoints.inventory import Inventory, take_inventory
from moeinf.runtime.checkpoints.quantised.fused_experts import MXFP4
from moeinf.runtime.config import Settings
from moeinf.runtime.hub.resolve import find_source
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.repacking.repack import repack
from scripts.make_checkpoint import byte_tokenizer
from tests.conftest import ignore
from tests.runtime.engine.test_quantised_families import TOLERANCE, near_the_reference, reference
from tests.tiny import save_tiny
from tests.tiny_deepseek_v4 import deepseek_v4
from tests.tiny_packed import nvfp4 as packed_nvfp4

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [16, 16]}
# Further keys of nvidia/DeepSeek-V4-Flash-NVFP4, without its lists of modules.
NVFP4_EXPERTS = {
    "quant_algo": "MIXED_PRECISION",
    "moe_quant_algo": "NVFP4",
    "group_size": 16,
    "kv_cache_quant_algo": None,
    "producer": {"name": "modelopt", "version": "dsv4-nvfp4-experts"},
}


def published(name: str) -> str:
    """Return the release's name of a tensor that transformers has saved."""
    name = name.replace("model.hc_head.hc_", "hc_head_").replace("model.embed_tokens.", "embed.")
    return name.removeprefix("model.")


def powers(*shape: int) -> Tensor:
    """Return scales near 2^-6 as transformers loads them, in bytes."""
    return torch.randint(119, 123, shape, dtype=torch.uint8)


def save_release(folder: Path, nvfp4: bool = False, **config: object) -> dict[str, Tensor]:
    """Write a checkpoint of random codes; return the widened weights as transformers has them.

    nvfp4: the experts have NVIDIA's form, in which transformers does not read them.
    """
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    save_tiny(deepseek_v4(hidden_size=32, moe_intermediate_size=64), folder)
    tensors, meaning = load_file(folder / "model.safetensors"), {}
    e8m0 = torch.float8_e8m0fnu
    for name, tensor in list(tensors.items()):
        short = published(name)
        tensors[short] = meaning[short] = tensors.pop(name)
        if ".experts." in name and nvfp4:
            rows, columns = tensor.shape
            stored, meaning[short] = packed_nvfp4(divides=False)(rows, columns, draw)
            tensors |= {short + end: part for end, part in stored.items()}
            tensors[short.removesuffix("weight") + "input_scale"] = torch.ones(())
            continue
        if ".experts." in name:
            codes = torch.randint(-128, 128, (len(tensor), tensor.shape[1] // 2), dtype=torch.int8)
            scales = powers(len(tensor), tensor.shape[1] // 32)
        elif name.endswith((".wq_a.weight", ".w1.weight", ".wo_a.weight", ".wkv.weight")):
            codes = tensor.to(torch.float8_e4m3fn)
            scales = powers(*(-(-side // 16) for side in tensor.shape))
        else:
            continue
        whole = scales.repeat_interleave(16, 0).repeat_interleave(16, 1)
        if codes.dtype == torch.int8:
            theirs = Fp8Dequantize(None)
            meaning[short] = theirs._dequantize_one(codes, scales.view(e8m0), torch.float32)
        else:
            factors = whole[: len(tensor), : tensor.shape[1]].view(e8m0).float()
            meaning[short] = codes.float() * factors
        tensors[short] = codes
        tensors[short.removesuffix(".weight") + ".scale"] = scales.view(e8m0)
    save_file(tensors, folder / "model.safetensors")
    path = folder / "config.json"
    section = {**FP8, **NVFP4_EXPERTS} if nvfp4 else FP8
    values = {**json.loads(path.read_text()), "expert_dtype": "fp4", "quantization_config": section}
    path.write_text(json.dumps({**values, **config}))
    return meaning


def taken(folder: Path) -> Inventory:
    checkpoint = open_checkpoint(folder)
    return take_inventory(family_of(checkpoint.config), checkpoint)


def widened(tensor: SourceTensor) -> Tensor:
    data = bytearray().join(encoded(tensor, "F32"))
    return torch.frombuffer(data, dtype=torch.float32).view(tensor.shape)


def test_every_weight_is_as_in_transformers(tmp_path: Path) -> None:
    meaning = save_release(tmp_path)
    found = taken(tmp_path)
    assert found.unused == []
    assert found.has_mxfp4
    experts = [t for parts in found.experts.values() for t in parts.values()]
    assert {tensor.dtype for tensor in experts} == {MXFP4}
    tensors = {tensor.name: tensor for tensor in (*found.dense.values(), *experts)}
    assert set(tensors) == set(meaning)
    for name, tensor in tensors.items():
        assert torch.equal(widened(tensor), meaning[name].float()), name


@pytest.mark.parametrize("beside", [True, False])
def test_experts_in_nvfp4_beside_fp8(beside: bool, tmp_path: Path) -> None:
    """The form of nvidia/DeepSeek-V4-Flash-NVFP4, with and without ModelOpt's own file."""
    meaning = save_release(tmp_path / "x", nvfp4=True)
    if beside:
        about = {
            "producer": {"name": "modelopt"},
            "quantization": {"quant_algo": "MIXED_PRECISION"},
        }
        (tmp_path / "x" / QUANTISED).write_text(json.dumps(about))
    found = taken(tmp_path / "x")
    assert (found.unused, found.has_nvfp4) == ([], True)
    experts = [t for parts in found.experts.values() for t in parts.values()]
    assert {tensor.dtype for tensor in experts} == {"NVFP4"}
    tensors = {tensor.name: tensor for tensor in (*found.dense.values(), *experts)}
    assert set(tensors) == set(meaning)
    assert sum(tensor.dtype == "F8_E4M3" for tensor in tensors.values()) > 8
    for name, tensor in tensors.items():
        assert torch.equal(widened(tensor), meaning[name].float()), name
    named, _ = find_source(str(tmp_path / "x"), None, Settings(tmp_path / "home"), ignore)
    assert named.tag == "nvfp4"


def test_nvfp4_without_scales(tmp_path: Path) -> None:
    save_release(tmp_path, nvfp4=True)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["layers.0.ffn.experts.0.w1.weight_scale_2"]
    save_file(tensors, path)
    with pytest.raises(BadCheckpoint, match=r"experts\.0\.w1\.weight' has no weight_scale_2"):
        taken(tmp_path)


@pytest.mark.parametrize("nvfp4", [False, True])
def test_a_release_in_its_default_tag(nvfp4: bool, tmp_path: Path) -> None:
    """Logits of a pulled release are those of its widened weights."""
    folder, settings = tmp_path / "deepseek-v4-flash", Settings(tmp_path / "home")
    save_release(folder, nvfp4)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    named, source = find_source(str(folder), None, settings, ignore)
    assert named.tag == ("nvfp4" if nvfp4 else "mxfp4")
    manifest = repack(source, Library(settings), named, ignore, ignore)
    assert manifest.dtype == named.tag.upper()
    plain, experts = reference(folder, named.tag)
    assert near_the_reference(manifest, settings, plain, experts) < TOLERANCE


def test_the_table_and_the_mixers_stay_exact(tmp_path: Path) -> None:
    save_release(tmp_path)
    found = taken(tmp_path)
    exact = {name.rsplit(".", 1)[1] for name in found.dense if found.form_of(name, "Q4") == "F32"}
    hyper = {"fn", "base", "scale", "hc_fn", "hc_base", "hc_scale"}
    assert exact == {*hyper, "e_score_correction_bias", "tid2eid"}


def test_scales_that_do_not_fit(tmp_path: Path) -> None:
    save_release(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["layers.0.ffn.experts.0.w1.scale"] = tensors["layers.0.ffn.experts.0.w1.scale"][:, :0]
    save_file(tensors, path)
    with pytest.raises(BadCheckpoint, match=r"has no scales \[64, 1\] F8_E8M0 of FP4 weights"):
        taken(tmp_path)


def test_codes_without_the_key_are_refused(tmp_path: Path) -> None:
    save_release(tmp_path, expert_dtype="fp8")
    with pytest.raises(ModelDataError, match="experts"):
        taken(tmp_path)
