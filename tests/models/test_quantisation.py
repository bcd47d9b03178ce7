"""Test that an unsupported quantisation is an error that names its method."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from moeinf.models import ModelDataError, family_of
from moeinf.models.quantisation import UnsupportedQuantisation
from tests.encoder_decoders import PAIRS
from tests.tiny import TINY, tiny_config

NAMES = ["mixtral", "olmoe", "deepseek-v3", "glm4", "gpt-oss", "phimoe", "qwen3", "qwen3.5"]
NAMES += ["switch", "nllb"]


def values(name: str) -> dict[str, Any]:
    if name in TINY:
        return dict(tiny_config(name).to_dict())
    pair = PAIRS[name]
    return dict(getattr(transformers, pair.config_class)(**pair.settings).to_dict())


@pytest.mark.parametrize(
    ("said", "method"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "AWQ (4 bits)"),
        ({"quant_method": "gptq", "bits": 8, "desc_act": False}, "GPTQ (8 bits)"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "auto-round", "bits": 2}, "AutoRound (2 bits)"),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            "compressed-tensors (NVFP4)",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "float-quantized"},
            "compressed-tensors (float-quantized)",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "ModelOpt (NVFP4)"),
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
