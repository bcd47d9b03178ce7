"""DeepSeek-V4's release: FP8 blocks with powers of 2 as scales, and experts in FP4."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from moeinf.models import ModelDataError, family_of
from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint, SourceTensor, open_checkpoint
from moeinf.runtime.checkpoints.encode import encoded
from moeinf.runtime.checkpoints.inventory import Inventory, take_inventory
from moeinf.runtime.checkpoints.quantised.fused_experts import MXFP4
from tests.tiny import save_tiny
from tests.tiny_deepseek_v4 import deepseek_v4

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [16, 16]}


def published(name: str) -> str:
    """Return the release's name of a tensor that transformers has saved."""
    name = name.replace("model.hc_head.hc_", "hc_head_").replace("model.embed_tokens.", "embed.")
    return name.removeprefix("model.")


def powers(*shape: int) -> Tensor:
    """Return scales near 2^-6 as transformers loads them, in bytes."""
    return torch.randint(119, 123, shape, dtype=torch.uint8)


def save_release(folder: Path, **config: object) -> dict[str, Tensor]:
    """Write a checkpoint of random codes; return the widened weights as transformers has them."""
    torch.manual_seed(0)
    save_tiny(deepseek_v4(hidden_size=32, moe_intermediate_size=64), folder)
    tensors, meaning = load_file(folder / "model.safetensors"), {}
    e8m0 = torch.float8_e8m0fnu
    for name, tensor in list(tensors.items()):
        short = published(name)
        tensors[short] = meaning[short] = tensors.pop(name)
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
    values = {**json.loads(path.read_text()), "expert_dtype": "fp4", "quantization_config": FP8}
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
