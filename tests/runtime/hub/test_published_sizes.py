"""Published configs parse, and each short name's parameter count is that of its config.

tests/data/configs.json has the values of published config.json files, without keys that no family
reads. tests/data/sizes.json has the published values of models whose file could not be had. FROM
says how the config of another short name differs. tests/data/README.md names the sources.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moeinf.models import FAMILIES, ModelDataError, family_of
from moeinf.runtime.hub.aliases import Entry, registry
from tests.fakes import DictParts

_DATA = Path(__file__).parents[2] / "data"
PUBLISHED: dict[str, dict[str, Any]] = json.loads((_DATA / "configs.json").read_text("utf-8"))
SIZES: dict[str, dict[str, Any]] = json.loads((_DATA / "sizes.json").read_text("utf-8"))
_QWEN3, _CODER = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-Coder-480B-A35B-Instruct"
_SWITCH = "google/switch-base-128"
FROM: dict[str, tuple[str, dict[str, Any]]] = {  # published file or short name, differing keys
    "mixtral": ("mistralai/Mixtral-8x7B-v0.1", {}),
    # Commit 314d82d of that repository, "Fixes for GQA support", changed 56 to 8.
    "snowflake-arctic": ("Snowflake/snowflake-arctic-instruct@7fb7fdc", {"num_key_value_heads": 8}),
    "deepseek-v2-lite": ("deepseek-ai/DeepSeek-V2-Lite", {}),
    "deepseek-v3-0324": ("deepseek-ai/DeepSeek-V3", {}),
    "deepseek-v3.1-terminus": ("deepseek-ai/DeepSeek-V3.1", {}),
    "deepseek-r1-0528": ("deepseek-ai/DeepSeek-R1", {}),
    "deepseek-v3.2-exp": ("deepseek-ai/DeepSeek-V3.2", {}),
    "deepseek-v3.2-speciale": ("deepseek-ai/DeepSeek-V3.2", {}),
    "glm-5-fp8": ("zai-org/GLM-5", {}),
    "glm-5.1": ("zai-org/GLM-5", {}),
    "gpt-oss-120b": (
        "openai/gpt-oss-20b",
        {"num_hidden_layers": 36, "num_local_experts": 128, "layer_types": None},
    ),
    "gemma-4-26b-a4b": ("google/gemma-4-26B-A4B", {}),
    "gemma-4-26b-a4b-qat": ("google/gemma-4-26B-A4B", {}),
    "glm-4.5v": ("zai-org/GLM-4.5V-FP8", {}),
    "glm-4.6": ("zai-org/GLM-4.5", {}),
    "glm-4.7": ("zai-org/GLM-4.5", {}),
    "glm-4.5-air-reap-82b-a12b": ("zai-org/GLM-4.5-Air", {"n_routed_experts": 96}),
    "glm-4.7-reap-218b-a32b": ("zai-org/GLM-4.5", {"n_routed_experts": 96}),
    "glm-4.7-flash-reap-23b-a3b": ("zai-org/GLM-4.7-Flash", {"n_routed_experts": 48}),
    "olmoe": ("allenai/OLMoE-1B-7B-0924", {}),
    **{f"switch-base-{n}": (_SWITCH, {"num_experts": n}) for n in (8, 16, 32, 64, 256)},
    "switch-large-128": (
        _SWITCH,
        {
            "d_model": 1024,
            "d_ff": 4096,
            "num_heads": 16,
            "num_layers": 24,
            "num_decoder_layers": 24,
            "num_sparse_encoder_layers": 12,
            "num_sparse_decoder_layers": 12,
        },
    ),
    "qwen1.5-moe": ("Qwen/Qwen1.5-MoE-A2.7B", {}),
    "qwen2-57b-a14b": ("Qwen/Qwen2-57B-A14B", {}),
    **dict.fromkeys(
        ("qwen3-30b-a3b-2507", "qwen3-30b-a3b-thinking", "qwen3-coder-30b-a3b"), (_QWEN3, {})
    ),
    "qwen3-coder-reap-25b-a3b": (_QWEN3, {"num_experts": 103}),
    "qwen3-coder-reap-246b-a35b": (_CODER, {"num_experts": 80}),
    "qwen3-coder-reap-363b-a35b": (_CODER, {"num_experts": 120}),
    "qwen3-235b-a22b-2507": ("Qwen/Qwen3-235B-A22B", {}),
    "qwen3-235b-a22b-thinking": ("Qwen/Qwen3-235B-A22B", {}),
    "qwen3.6-35b-a3b": ("Qwen/Qwen3.5-35B-A3B", {}),
    "minimax-m2.7": ("MiniMaxAI/MiniMax-M2.5", {}),
    "minimax-m2": ("MiniMaxAI/MiniMax-M2.5", {}),
    "minimax-m2-reap-162b-a10b": ("MiniMaxAI/MiniMax-M2.5", {"num_local_experts": 180}),
    "qwen3-next-80b-a3b": ("Qwen/Qwen3-Next-80B-A3B-Thinking", {}),
    **dict.fromkeys(("kimi-k2-0905", "kimi-k2-thinking"), ("moonshotai/Kimi-K2-Instruct", {})),
    **dict.fromkeys(("kimi-k2.6", "kimi-k2.7-code"), ("moonshotai/Kimi-K2.5", {})),
    "qwen3-coder-next": ("Qwen/Qwen3-Next-80B-A3B-Thinking", {}),
    "granite-4.0-h-tiny": (
        "ibm-granite/granite-4.0-h-small",
        {
            "hidden_size": 1536,
            "intermediate_size": 512,
            "logits_scaling": 6,
            "shared_intermediate_size": 1024,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "num_local_experts": 64,
            "num_experts_per_tok": 6,
            "mamba_n_heads": 48,
        },
    ),
    "nemotron-3-super-120b-a12b": ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", {}),
}


class Counted(DictParts):
    """`Parts` that has every tensor that is asked for, without data."""

    def __init__(self) -> None:
        super().__init__({})
        self.counts: dict[str, int] = {}

    def tensor(self, name: str, *shape: int) -> Tensor:
        self.counts[name] = math.prod(shape)
        return torch.empty(shape, device="meta")


def config_of(entry: Entry) -> dict[str, Any]:
    """Return the published config of a short name; raise KeyError if it is missing here."""
    if entry.repo in PUBLISHED:
        return PUBLISHED[entry.repo]
    known = PUBLISHED | SIZES
    base, changes = FROM.get(entry.name, (entry.name, {}))
    return {**known[base], **changes}


def parameters(config: dict[str, Any]) -> float:
    """Return a model's parameters in billions, experts included."""
    config = {"max_position_embeddings": config.get("model_max_length", 4096), **config}
    family, parts = family_of(config), Counted()
    parsed = family.parse(config)
    moe = family.build(parsed, parts).moe
    expert = sum(math.prod(shape) for shape in moe.parts.values())
    return (sum(parts.counts.values()) + moe.layers * moe.experts * expert) / 1e9


@pytest.mark.parametrize("entry", registry().values(), ids=lambda entry: entry.name)
def test_the_count_is_the_published_one(entry: Entry) -> None:
    config = config_of(entry)
    assert family_of(config).model_type == FAMILIES[entry.family].model_type
    count = parameters(config)
    assert count == pytest.approx(entry.parameters, rel=0.01)
    if pruned := re.search(r"-reap-(\d+)b-", entry.name):  # the size is in the published name
        assert round(count) == int(pruned[1])


def test_what_lacks_a_published_config() -> None:
    """sizes.json has these models, and no other, because their config.json could not be had."""
    bases = {FROM.get(e.name, (e.name, {}))[0]: e for e in registry().values()}
    lacking = {name for name, entry in bases.items() if entry.repo not in PUBLISHED}
    assert lacking - PUBLISHED.keys() == SIZES.keys()


def test_k_exaone_has_as_many_parameters_as_its_published_tensors() -> None:
    """An inventory of all tensors of the published GGUF file, whose MTP layer is left out."""
    config = config_of(registry()["k-exaone-236b-a23b"])
    assert round(parameters(config) * 1e9) == 237_099_669_632 - 528_513_280


@pytest.mark.parametrize("repo", sorted(PUBLISHED))
def test_a_published_config_parses(repo: str) -> None:
    config = PUBLISHED[repo]
    assert family_of(config).parse(config).moe.experts >= 8


@pytest.mark.parametrize(
    "model_type",
    [
        *(
            "deepseek",
            "deepseek_ref",
            "grinmoe",
            "jamba",
            "jetmoe",
            "kimi_k3",
            "llama4",
            "llama_moe",
        ),
        *("minimax_m3", "minimax_m3_vl", "openmoe", "qwen3_vl_moe", "step3p7", "xverse", "yuan"),
    ],
)
def test_other_families_are_refused_by_name(model_type: str) -> None:
    with pytest.raises(ModelDataError, match=f"model_type '{model_type}' is not supported"):
        family_of({"model_type": model_type, "num_experts": 8})


@pytest.mark.parametrize(
    "more", [{"scale_factor": 4.0, "moe_type": "modulelist"}, {"intermediate_size_residual": 1792}]
)
def test_llama_moe_v2_has_mixtrals_model_type(more: dict[str, Any]) -> None:
    """Its null keys say nothing."""
    config = {**PUBLISHED["mistralai/Mixtral-8x7B-v0.1"], "top_k_attn": None}
    family = family_of(config)
    assert family.parse({**config, "intermediate_size_residual": None}) == family.parse(config)
    with pytest.raises(ModelDataError, match="is LLaMA-MoE-v2, which is not supported"):
        family.parse({**config, **more})


def test_a_config_without_model_type_is_refused_by_its_architecture() -> None:
    """Such is the file of MiniCPM-MoE."""
    told = r"model_type absent \(architectures: MiniCPMForCausalLM\) is not supported"
    with pytest.raises(ModelDataError, match=told):
        family_of({"architectures": ["MiniCPMForCausalLM", 3], "num_experts": 8})
    for values in ({}, {"architectures": "x"}, {"architectures": [None]}, {"model_type": 3}):
        with pytest.raises(ModelDataError, match="model_type absent is not supported"):
            family_of(values)
