"""Published configs parse, and each short name's parameter count is that of its config.

tests/data/configs.json has the values of published config.json files, without keys that no family
reads. tests/data/sizes.json has the published values of models whose file could not be had. FROM
says how the config of another short name differs. tests/data/README.md names the sources.
"""

from __future__ import annotations

import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moeinf.models.base import Family, ModelDataError
from moeinf.models.families import FAMILIES, family_of
from moeinf.runtime.hub.aliases import Entry, registry
from tests.fakes import DictParts

_DATA = Path(__file__).parents[2] / "data"
PUBLISHED: dict[str, dict[str, Any]] = json.loads((_DATA / "configs.json").read_text("utf-8"))
REFUSED: dict[str, dict[str, Any]] = json.loads((_DATA / "refused.json").read_text("utf-8"))
UNSUPPORTED = "is not supported"
OTHER_WORDS = {  # models with the model_type of a family that is supported
    "nvidia/Gemma-4-31B-IT-NVFP4": "enable_moe_block is not true: gemma4 is supported with experts",
    **dict.fromkeys(("moe-lrc/llamamoe2", "moe-lrc/llamamoe2s"), "is LLaMA-MoE-v2, which is not"),
}
SIZES: dict[str, dict[str, Any]] = json.loads((_DATA / "sizes.json").read_text("utf-8"))
_QWEN3, _CODER = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-Coder-480B-A35B-Instruct"
_SWITCH, _NEMOTRON = "google/switch-base-128", "nvidia/NVIDIA-Nemotron-3"
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
    "minimax-m2.7": ("nvidia/MiniMax-M2.7-NVFP4", {}),
    "minimax-m2": ("MiniMaxAI/MiniMax-M2.5", {}),
    "minimax-m2-reap-162b-a10b": ("MiniMaxAI/MiniMax-M2.5", {"num_local_experts": 180}),
    "qwen3-next-80b-a3b": ("Qwen/Qwen3-Next-80B-A3B-Thinking", {}),
    **dict.fromkeys(("kimi-k2-0905", "kimi-k2-thinking"), ("moonshotai/Kimi-K2-Instruct", {})),
    "kimi-k2.6": ("moonshotai/Kimi-K2.5", {}),
    "kimi-k2.7-code": ("nvidia/Kimi-K2.7-Code-NVFP4", {}),
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


# The makers' counts, most of them in a model's name, the others in its card or report.
COUNTS: dict[str, tuple[float, bool]] = {  # billions, and whether MTP layers are among them
    "deepseek-v3": (671, False),
    "deepseek-r1": (685, True),
    "deepseek-v3.2": (671, False),
    "deepseek-v4-flash": (284, False),
    "ernie-4.5-300b-a47b": (300, False),
    "gemma-4-26b-a4b": (26, False),
    "glm-4.5": (355, False),
    "glm-5": (744, False),
    "glm-5.3-flash": (320, True),
    "gpt-oss": (20.9, False),
    "gpt-oss-120b": (116.8, False),
    "hunyuan-a13b": (80, False),
    "k-exaone-236b-a23b": (236, False),
    "kimi-k2": (1000, False),
    "kimi-linear-48b-a3b": (48, False),
    "laguna-s-2.1": (118, False),
    "lfm2-8b-a1b": (8.3, False),
    "mimo-v2-flash": (309, False),
    "minimax-m2": (229, False),
    "mistral-small-4": (119, False),
    "nemotron-3-nano-30b-a3b": (31.6, False),
    "nemotron-3-super-120b-a12b": (120, False),
    "nemotron-3-ultra-550b-a55b": (550, False),
    "qwen3-30b-a3b": (30.5, False),
    "qwen3-235b-a22b": (235, False),
    "qwen3-coder-480b-a35b": (480, False),
    "qwen3-next-80b-a3b": (80, False),
    "qwen3.5-122b-a10b": (122, False),
    "qwen3.5-397b-a17b": (397, False),
    "qwen3.8-flash-next": (125 + 51, False),  # the rows of n-grams are counted apart
}
DIFFERING: dict[str, float] = {  # by more than 1 %: the computed count
    "gemma-4-26b-a4b": 25.2,  # the rest is the vision part, which is left out here
    "glm-5.3-flash": 313.3,  # without the MTP layer, which this family leaves out
    "kimi-k2": 1026.4,  # published as 1T
    "kimi-linear-48b-a3b": 49.1,  # published as 48B, and as 49B by the hub's own count
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


def parameters(config: dict[str, Any], mtp: bool = False) -> float:
    """Return a model's parameters in billions, experts included; mtp: with its MTP layers."""
    config = {"max_position_embeddings": config.get("model_max_length", 4096), **config}
    family = family_of(config)
    parsed = family.parse(config)
    counted = _counted(family, parsed)
    if mtp and (modules := family.mtp(parsed)) is not None:
        counted += _counted(modules, modules.parse(config))
    return counted / 1e9


@cache
def count_of(name: str, mtp: bool = False) -> float:
    """Return the parameters of a short name's model in billions."""
    return parameters(config_of(registry()[name]), mtp)


def _counted(family: Family, parsed: Any) -> int:
    parts = Counted()
    moe = family.build(parsed, parts).moe
    expert = sum(math.prod(shape) for shape in moe.parts.values())
    return sum(parts.counts.values()) + moe.layers * moe.experts * expert


@pytest.mark.parametrize(
    ("quantised", "plain"),
    [
        ("Qwen/Qwen3-235B-A22B-FP8", "Qwen/Qwen3-235B-A22B"),
        ("Qwen/Qwen3-30B-A3B-FP8", "Qwen/Qwen3-30B-A3B"),
        ("nvidia/DeepSeek-V3.1-NVFP4", "deepseek-ai/DeepSeek-V3.1"),
        ("nvidia/DeepSeek-V4-Flash-NVFP4", "deepseek-ai/DeepSeek-V4-Flash"),
        ("nvidia/DeepSeek-V4-Pro-NVFP4", "deepseek-ai/DeepSeek-V4-Pro"),
        ("nvidia/GLM-5-NVFP4", "zai-org/GLM-5"),
        ("nvidia/GLM-5.1-NVFP4", "zai-org/GLM-5.1"),
        ("nvidia/GLM-5.2-NVFP4", "zai-org/GLM-5.2-FP8"),
        ("nvidia/Kimi-K2.5-NVFP4", "moonshotai/Kimi-K2.5"),
        ("nvidia/MiniMax-M2.5-NVFP4", "MiniMaxAI/MiniMax-M2.5"),
        (f"{_NEMOTRON}-Nano-30B-A3B-NVFP4", f"{_NEMOTRON}-Nano-30B-A3B-BF16"),
        (f"{_NEMOTRON}-Ultra-550B-A55B-FP8", f"{_NEMOTRON}-Ultra-550B-A55B-BF16"),
        (f"{_NEMOTRON}-Ultra-550B-A55B-NVFP4", f"{_NEMOTRON}-Ultra-550B-A55B-BF16"),
        ("nvidia/Qwen3-235B-A22B-NVFP4", "Qwen/Qwen3-235B-A22B"),
        ("nvidia/Qwen3.5-122B-A10B-NVFP4", "Qwen/Qwen3.5-122B-A10B"),
        ("nvidia/Qwen3.5-397B-A17B-NVFP4", "Qwen/Qwen3.5-397B-A17B"),
        ("zai-org/GLM-5-FP8", "zai-org/GLM-5"),
    ],
)
def test_a_quantised_release_is_the_plain_model(quantised: str, plain: str) -> None:
    """Its config says the same of all layers."""
    ours, theirs = (family_of(one).parse(one) for one in (PUBLISHED[quantised], PUBLISHED[plain]))
    assert ours == theirs


@pytest.mark.parametrize("entry", registry().values(), ids=lambda entry: entry.name)
def test_the_count_is_that_of_the_table(entry: Entry) -> None:
    assert family_of(config_of(entry)).model_type == FAMILIES[entry.family].model_type
    count = count_of(entry.name)
    assert count == pytest.approx(entry.parameters, rel=0.01)
    if pruned := re.search(r"-reap-(\d+)b-", entry.name):  # the size is in the published name
        assert round(count) == int(pruned[1])


@pytest.mark.parametrize("name", COUNTS)
def test_the_count_is_the_published_one(name: str) -> None:
    """DeepSeek-V3's README counts the MTP layer apart: 671 billion, and 685 with it."""
    published, mtp = COUNTS[name]
    computed = count_of(name, mtp)
    expected = DIFFERING.get(name, published)
    assert computed == pytest.approx(expected, rel=0.002 if name in DIFFERING else 0.01)
    assert (abs(computed / published - 1) > 0.01) == (name in DIFFERING)


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


@pytest.mark.parametrize("model", sorted(REFUSED))
def test_other_families_are_refused_by_name(model: str) -> None:
    config = REFUSED[model]
    with pytest.raises(ModelDataError, match=re.escape(OTHER_WORDS.get(model, UNSUPPORTED))) as no:
        family_of(config).parse(config)
    assert (config.get("model_type") or config["architectures"][0]) in str(no.value)


def test_llama_moe_v2_has_mixtrals_keys() -> None:
    """Its null keys say nothing."""
    config = {**PUBLISHED["mistralai/Mixtral-8x7B-v0.1"], "top_k_attn": None}
    family = family_of(config)
    assert family.parse({**config, "intermediate_size_residual": None}) == family.parse(config)


def test_a_config_without_model_type_is_refused_by_its_architecture() -> None:
    """Such is the file of MiniCPM-MoE."""
    told = r"model_type absent \(architectures: MiniCPMForCausalLM\) is not supported"
    with pytest.raises(ModelDataError, match=told):
        family_of({"architectures": ["MiniCPMForCausalLM", 3], "num_experts": 8})
    for values in ({}, {"architectures": "x"}, {"architectures": [None]}, {"model_type": 3}):
        with pytest.raises(ModelDataError, match="model_type absent is not supported"):
            family_of(values)
