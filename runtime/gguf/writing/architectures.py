"""Describe a family's model in the keys of llama.cpp, and refuse what llama.cpp computes otherwise.

Source: the conversion and src/models of github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from moeinf.models.arctic import ArcticConfig
from moeinf.models.gpt_oss import GptOssConfig
from moeinf.models.layers.rope import RopeConfig
from moeinf.models.mixtral import MixtralConfig
from moeinf.models.olmoe import OlmoeConfig
from moeinf.models.phimoe import PhimoeConfig
from moeinf.models.qwen2_moe import Qwen2MoeConfig
from moeinf.models.qwen3_moe import Qwen3MoeConfig
from moeinf.runtime.gguf.writing.delta_net import qwen3_next, qwen35
from moeinf.runtime.gguf.writing.description import (
    CannotExport,
    Written,
    heads,
    refuse,
    rope_keys,
    rounding,
    sizes,
    stretched,
    windowed,
)
from moeinf.runtime.gguf.writing.hybrid import granite_hybrid, granitemoe, lfm2, nemotron
from moeinf.runtime.gguf.writing.latent import (
    deepseek_v2,
    deepseek_v3,
    glm_dsa,
    kimi_linear,
    mistral4,
    v32,
)
from moeinf.runtime.gguf.writing.recombined import ernie, hunyuan, laguna, minimax
from moeinf.runtime.gguf.writing.sigmoid import dots1, exaone, glm4
from moeinf.runtime.gguf.writing.streams import deepseek_v4, glm5_next, qwen4
from moeinf.runtime.gguf.writing.windowed import gemma4, mimo

_PHIMOE = (
    "llama.cpp runs phimoe with RMSNorm in place of LayerNorm, and with a softmax in place of the "
    "sparse mixer: its answers differ from this model's"
)


def written(model_type: str, config: Any) -> Written:
    """Return the description of a model of this family and checked config.

    Raises CannotExport for a family without a counterpart, or for a switch that llama.cpp ignores.
    """
    describe = _FAMILIES.get(model_type)
    if describe is None:
        known = ", ".join(sorted(_FAMILIES))
        raise CannotExport(f"{model_type}: the family cannot be exported as GGUF (only {known})")
    return describe(config)


def _olmoe(config: OlmoeConfig) -> Written:
    body, shape, moe = config.body, config.attention, config.moe
    refuse(
        "olmoe",
        {
            "attention_bias": shape.bias,
            "clip_qkv": shape.clip is not None,
            "norm_topk_prob": config.renormalise,
            "num_key_value_heads": shape.kv_heads != shape.heads,
        },
    )
    keys = sizes(body, moe) | heads(shape) | rope_keys("olmoe", body.rope, shape.head_dim)
    keys["feed_forward_length"] = moe.intermediate
    return Written(
        "olmoe",
        keys,
        range(body.layers),
        copies_embedding=body.tied_embeddings,
        notes=rounding(body.rope),
    )


def _qwen3_moe(config: Qwen3MoeConfig) -> Written:
    body, shape, moe = config.body, config.attention, config.moe
    refuse(
        "qwen3_moe",
        {
            "attention_bias": shape.bias,
            "sliding_window": windowed(shape, body),
            "norm_topk_prob = false": not config.renormalise,
            "layers without experts": moe.layers < body.layers,
        },
    )
    keys = sizes(body, moe) | heads(shape) | rope_keys("qwen3_moe", body.rope, shape.head_dim)
    keys["expert_feed_forward_length"] = moe.intermediate
    return Written("qwen3moe", keys, range(body.layers), notes=rounding(body.rope))


def _mixtral(config: MixtralConfig) -> Written:
    body, shape, moe = config.body, config.attention, config.moe
    refuse("mixtral", {"sliding_window": windowed(shape, body)})
    keys = sizes(body, moe) | heads(shape) | rope_keys("mixtral", body.rope, shape.head_dim, True)
    keys["feed_forward_length"] = moe.intermediate
    return Written(
        "llama",
        keys,
        range(body.layers),
        paired={"attn_q": shape.heads, "attn_k": shape.kv_heads},
        factors=stretched(body.rope, shape.head_dim),
        notes=rounding(body.rope),
    )


def _gpt_oss(config: GptOssConfig) -> Written:
    body, shape, moe = config.body, config.attention[0], config.moe
    windows = {layer.window for layer in config.attention[::2]}
    alternate = len(windows) == 1 and None not in windows
    refuse(
        "gpt_oss",
        {
            "attention_bias = false": not shape.bias,
            "layer_types": not alternate or any(layer.window for layer in config.attention[1::2]),
        },
    )
    assert shape.window is not None
    keys = sizes(body, moe) | heads(shape) | rope_keys("gpt_oss", body.rope, shape.head_dim)
    keys["expert_feed_forward_length"] = moe.intermediate
    keys["attention.sliding_window"] = shape.window
    return Written(
        "gpt-oss",
        keys,
        range(body.layers),
        copies_embedding=body.tied_embeddings,
        notes=rounding(body.rope),
    )


def _qwen2_moe(config: Qwen2MoeConfig) -> Written:
    body, shape, moe = config.body, config.attention, config.moe
    refuse(
        "qwen2_moe",
        {
            "sliding_window": bool(config.sliding) and windowed(shape, body),
            "norm_topk_prob": config.renormalise,
            "layers without experts": moe.layers < body.layers,
            "head_dim": shape.heads * shape.head_dim != body.hidden,
        },
    )
    keys = sizes(body, moe) | heads(shape) | rope_keys("qwen2_moe", body.rope, shape.head_dim)
    keys["expert_feed_forward_length"] = moe.intermediate
    keys["expert_shared_feed_forward_length"] = config.shared_intermediate
    return Written(
        "qwen2moe",
        keys,
        range(body.layers),
        copies_embedding=body.tied_embeddings,
        notes=rounding(body.rope),
    )


def _arctic(config: ArcticConfig) -> Written:
    body, shape, moe = config.body, config.attention, config.moe
    refuse(
        "arctic",
        {
            "attention_bias": shape.bias,
            "sliding_window": windowed(shape, body),
            "head_dim": shape.heads * shape.head_dim != body.hidden,
        },
    )
    keys = sizes(body, moe) | heads(shape) | rope_keys("arctic", body.rope, shape.head_dim)
    return Written(
        "arctic",
        keys | {"feed_forward_length": moe.intermediate},
        range(body.layers),
        paired={"attn_q": shape.heads, "attn_k": shape.kv_heads},
        notes=rounding(body.rope),
    )


def _phimoe(config: PhimoeConfig) -> Written:
    """Describe Phi-3.5-MoE. llama.cpp runs it with other norms and another router, and one factor.

    Its files are useful nevertheless: they are the same as those of llama.cpp's converter.
    """
    body, shape, moe, rope = config.body, config.attention, config.moe, config.body.rope
    refuse(
        "phimoe",
        {
            "attention_bias = false": not shape.bias,
            "lm_head_bias = false": not body.head_bias,
            "sliding_window": windowed(shape, body),
            "head_dim": shape.heads * shape.head_dim != body.hidden,
            "router_jitter_noise": config.jitter != 0.01,  # no file records it
            "a long_mscale other than short_mscale": rope.short_mscale != rope.long_mscale,
        },
    )
    keys = sizes(body, moe) | heads(shape)
    factors: dict[str, tuple[float, ...]] = {}
    if rope.kind == "longrope":
        assert rope.short_mscale is not None
        keys |= rope_keys("phimoe", RopeConfig(rope.theta), shape.head_dim)
        keys["rope.scaling.original_context_length"] = rope.original_context
        keys["rope.scaling.attn_factor"] = rope.short_mscale
        factors = {"rope_factors_long.weight": rope.long, "rope_factors_short.weight": rope.short}
    else:
        keys |= rope_keys("phimoe", rope, shape.head_dim)
    return Written(
        "phimoe",
        keys | {"feed_forward_length": moe.intermediate},
        range(body.layers),
        factors=factors,
        notes=(_PHIMOE,),
    )


_FAMILIES: dict[str, Callable[[Any], Written]] = {
    "arctic": _arctic,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": partial(deepseek_v3, "deepseek_v3"),
    "deepseek_v32": v32,
    "deepseek_v4": deepseek_v4,
    "dots1": dots1,
    "ernie4_5_moe": ernie,
    "exaone_moe": exaone,
    "gemma4": gemma4,
    "glm4_moe": partial(glm4, "glm4_moe"),
    "glm4_moe_lite": partial(deepseek_v3, "glm4_moe_lite"),
    "glm5_next": glm5_next,
    "glm_moe_dsa": glm_dsa,
    "gpt_oss": _gpt_oss,
    "granitemoe": partial(granitemoe, "granitemoe"),
    "granitemoehybrid": granite_hybrid,
    "granitemoeshared": partial(granitemoe, "granitemoeshared"),
    "hunyuan_v1_moe": hunyuan,
    "kimi_linear": kimi_linear,
    "laguna": laguna,
    "lfm2_moe": lfm2,
    "mimo_v2_flash": mimo,
    "minimax_m2": minimax,
    "mistral4": mistral4,
    "mixtral": _mixtral,
    "nemotron_h": nemotron,
    "olmoe": _olmoe,
    "phimoe": _phimoe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_5_moe": qwen35,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": qwen3_next,
    "qwen4_exp": qwen4,
    "solar_open": partial(glm4, "solar_open"),
}
