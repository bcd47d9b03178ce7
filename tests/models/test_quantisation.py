"""Test that an unsupported quantisation is an error that names its method."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from moeinf.models.base import ModelDataError
from moeinf.models.families import family_of
from moeinf.models.quantisation import UnsupportedQuantisation
from tests.encoder_decoders import PAIRS
from tests.tiny import TINY, tiny_config
from tests.tiny_packed import compressed, scheme

NAMES = ["mixtral", "olmoe", "deepseek-v3", "glm4", "gpt-oss", "phimoe", "qwen3", "qwen3.5"]
NAMES += ["switch", "nllb"]


def values(name: str) -> dict[str, Any]:
    if name in TINY:
        return dict(tiny_config(name).to_dict())
    pair = PAIRS[name]
    return dict(getattr(transformers, pair.config_class)(**pair.settings).to_dict())


def mixed(form: str) -> dict[str, Any]:
    """Return a quantization_config with packed integers and a group of another form."""
    said = compressed(scheme(), scheme(), form="mixed-precision")
    for group, name in zip(said["config_groups"].values(), ("pack-quantized", form), strict=True):
        group["format"] = name
    return said


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        compressed(scheme()),
        compressed(scheme(8, 0, symmetric=False)),
        {**compressed({**scheme(), "actorder": "weight"}), "sparsity_config": {}},
        compressed({"num_bits": 4, "type": "float"}, form="nvfp4-pack-quantized"),
        compressed({"num_bits": 8, "block_structure": [128, 128]}, form="float-quantized"),
        mixed("nvfp4-pack-quantized"),
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
    ],
)
@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3", "glm4", "qwen3.5"])
def test_the_forms_that_are_read(said: dict[str, Any], name: str) -> None:
    config = {**values(name), "quantization_config": said}
    assert family_of(config).parse(config) == family_of(config).parse(values(name))


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups"),
        ({**compressed(scheme()), "config_groups": {"a": 7}}, "config_groups: a must be an object"),
        (compressed({**scheme(), "num_bits": "4"}), "num_bits"),
        (compressed({**scheme(), "group_size": -2}), "group_size"),
        (compressed({**scheme(), "strategy": "tensor"}), "strategy"),
        (compressed({**scheme(), "type": "float"}), "type"),
        (compressed({**scheme(), "symmetric": None}), "symmetric"),
    ],
)
def test_groups_that_make_no_sense(said: dict[str, Any], problem: str) -> None:
    config = {**values("qwen3"), "quantization_config": said}
    with pytest.raises(ModelDataError, match=problem):
        family_of(config).parse(config)


@pytest.mark.parametrize(
    ("said", "method"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "AWQ (4 bits)"),
        ({"quant_method": "gptq", "bits": 8, "desc_act": False}, "GPTQ (8 bits)"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "auto-round", "bits": 2}, "AutoRound (2 bits)"),
        (
            {"quant_method": "compressed-tensors", "format": "int-quantized"},
            "compressed-tensors (int-quantized)",
        ),
        (compressed(scheme(3)), "compressed-tensors (3 bits)"),
        (compressed({**scheme(), "actorder": "group"}), "compressed-tensors (actorder group)"),
        (
            {**compressed(scheme()), "sparsity_config": {"format": "sparse-24-bitmask"}},
            "compressed-tensors (sparse)",
        ),
        (
            compressed({"num_bits": 8, "block_structure": [96, 128]}, form="float-quantized"),
            "compressed-tensors (odd blocks)",
        ),
        (mixed("mxfp4-pack-quantized"), "compressed-tensors (mxfp4-pack-quantized)"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "ModelOpt (NVFP4_AWQ)"),
        ({"quant_method": "modelopt"}, "ModelOpt"),
        ({"quant_method": "quanto"}, "quanto"),
        ({"quant_method": "\x1b[31mred" + "x" * 99}, "[31mred" + "x" * 32),
        ({"bits": 4}, "an unnamed method (4 bits)"),
        ({"quant_method": 7}, "7"),
    ],
)
@pytest.mark.parametrize("name", ["mixtral", "qwen3.5", "nllb"])
def test_the_method_is_named(said: dict[str, Any], method: str, name: str) -> None:
    config = {**values(name), "quantization_config": said}
    with pytest.raises(UnsupportedQuantisation) as caught:
        family_of(config).parse(config)
    assert caught.value.method == method
    assert method in str(caught.value)
    assert "quantization_config" in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_every_family_looks(name: str) -> None:
    for key in ("quantization_config", "compression_config"):
        config = {**values(name), key: {"quant_method": "compressed-tensors"}}
        with pytest.raises(UnsupportedQuantisation, match="compressed-tensors"):
            family_of(config).parse(config)
    config = {**values(name), "quantization_config": {}}
    assert family_of(config).parse(config) == family_of(config).parse(values(name))
    config["quantization_config"] = ["awq"]
    with pytest.raises(ModelDataError, match="quantization_config must be an object"):
        family_of(config).parse(config)
