"""The families that can run, as an explicit table.

Nothing named in a downloaded config is ever imported or executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeinf.models import (
    arctic,
    deepseek_v2,
    deepseek_v3,
    deepseek_v4,
    deepseek_v32,
    dots1,
    ernie4_5_moe,
    exaone_moe,
    gemma4,
    glm4_moe,
    glm4_moe_lite,
    glm4v_moe,
    glm5_next,
    glm_moe_dsa,
    gpt_oss,
    granitemoe,
    granitemoehybrid,
    hunyuan_v1_moe,
    kimi_k25,
    kimi_linear,
    laguna,
    lfm2_moe,
    mimo_v2_flash,
    minimax_m2,
    mistral4,
    mixtral,
    nemotron_h,
    olmoe,
    phimoe,
    qwen2_moe,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    qwen4_exp,
    solar_open,
)
from moeinf.models.base import Family, ModelDataError
from moeinf.models.seq2seq import nllb_moe, switch_transformers

FAMILIES: Mapping[str, Family] = {
    "arctic": arctic.FAMILY,
    "deepseek_v2": deepseek_v2.FAMILY,
    "deepseek_v3": deepseek_v3.FAMILY,
    "deepseek_v32": deepseek_v32.FAMILY,
    "deepseek_v4": deepseek_v4.FAMILY,
    "dots1": dots1.FAMILY,
    "ernie4_5_moe": ernie4_5_moe.FAMILY,
    "exaone_moe": exaone_moe.FAMILY,
    "gemma4": gemma4.FAMILY,
    "gemma4_text": gemma4.FAMILY,  # saved without what sees
    "glm4_moe": glm4_moe.FAMILY,
    "glm4_moe_lite": glm4_moe_lite.FAMILY,
    "glm4v_moe": glm4v_moe.FAMILY,
    "glm4v_moe_text": glm4v_moe.FAMILY,  # saved without its vision part
    "glm5_next": glm5_next.FAMILY,
    "glm5_next_text": glm5_next.FAMILY,  # saved without its vision part
    "glm_moe_dsa": glm_moe_dsa.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
    "granitemoe": granitemoe.FAMILY,
    "granitemoehybrid": granitemoehybrid.FAMILY,
    "granitemoeshared": granitemoe.SHARED,
    "hunyuan_v1_moe": hunyuan_v1_moe.FAMILY,
    "kimi_k2": deepseek_v3.FAMILY,
    "kimi_k25": kimi_k25.FAMILY,
    "kimi_linear": kimi_linear.FAMILY,
    "laguna": laguna.FAMILY,
    "lfm2_moe": lfm2_moe.FAMILY,
    "mimo_v2_flash": mimo_v2_flash.FAMILY,
    "minimax_m2": minimax_m2.FAMILY,
    "mistral3": mistral4.INNER,
    "mistral4": mistral4.FAMILY,
    "mixtral": mixtral.FAMILY,
    "nemotron_h": nemotron_h.FAMILY,
    "nllb-moe": nllb_moe.FAMILY,
    "olmoe": olmoe.FAMILY,
    "phimoe": phimoe.FAMILY,
    "qwen2_moe": qwen2_moe.FAMILY,
    "qwen3_5_moe": qwen3_5_moe.FAMILY,
    "qwen3_5_moe_text": qwen3_5_moe.FAMILY,  # saved without its vision part
    "qwen3_moe": qwen3_moe.FAMILY,
    "qwen3_next": qwen3_next.FAMILY,
    "qwen4_exp": qwen4_exp.FAMILY,
    "qwen4_exp_text": qwen4_exp.FAMILY,  # saved without its vision part
    "solar_open": solar_open.FAMILY,
    "switch_transformers": switch_transformers.FAMILY,
}
_FORMER = {("hunyuan", "HunYuanMoEV1ForCausalLM"): hunyuan_v1_moe.FAMILY}  # Hunyuan-A13B's first


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family that config.json's model_type names; raise ModelDataError for others.

    A former model_type that several architectures shared needs the name of one, too.
    """
    name = config.get("model_type") if isinstance(config, Mapping) else None
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None and isinstance(name, str):
        classes = config.get("architectures")
        for (former, one), known in _FORMER.items():
            if former == name and isinstance(classes, list) and one in classes:
                family = known
    if family is None:
        shown = repr(name[:40]) if isinstance(name, str) else f"absent{_architectures(config)}"
        raise ModelDataError(
            f"config.json: model_type {shown} is not supported; supported: {', '.join(FAMILIES)}"
        )
    return family


def _architectures(config: object) -> str:
    """Return the classes that a config without model_type names, in brackets."""
    named = config.get("architectures") if isinstance(config, Mapping) else None
    words = [one[:40] for one in named if isinstance(one, str)] if isinstance(named, list) else []
    return f" (architectures: {', '.join(words[:2])})" if words else ""
