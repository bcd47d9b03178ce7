"""Describe a family's model in the keys of llama.cpp, and refuse what llama.cpp computes otherwise.

Source: the conversion and src/models of github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from moeinf.errors import UnusableInput
from moeinf.models.base import MoeShape
from moeinf.models.deepseek_v2 import DeepseekV2Config
from moeinf.models.deepseek_v3 import DeepseekV3Config
from moeinf.models.glm4_moe import Glm4MoeConfig
from moeinf.models.gpt_oss import GptOssConfig
from moeinf.models.granitemoe import GraniteMoeConfig
from moeinf.models.layers.attention import GqaShape
from moeinf.models.layers.decoder import BodyConfig
from moeinf.models.layers.feed_forward import FfnPlan
from moeinf.models.layers.mla import MlaShape
from moeinf.models.layers.rope import RopeConfig, attention_factor
from moeinf.models.layers.sigmoid_experts import SigmoidExperts
from moeinf.models.mixtral import MixtralConfig
from moeinf.models.olmoe import OlmoeConfig
from moeinf.models.qwen2_moe import Qwen2MoeConfig
from moeinf.models.qwen3_moe import Qwen3MoeConfig
from moeinf.runtime.gguf.writing.writer import Value

_SOFTMAX, _SIGMOID = 1, 2  # of expert_gating_func
_LITE_LAYERS = (26, 27)  # llama.cpp takes these for DeepSeek-V2-Lite, without q_lora_rank


class CannotExport(UnusableInput, ValueError):
    """llama.cpp cannot run the model, or would compute something else."""

    code = "cannot_export"
    hint = "`moeinf export --help`, which names the families"


@dataclass(frozen=True)
class Written:
    """The description of a model for llama.cpp.

    keys           metadata, without the name of the architecture in front
    moe_layers     the decoder layer of each MoE layer
    copies_embedding  llama.cpp wants an output head, and the checkpoint ties it to the embedding
    paired         heads of the tensors whose rows are in another order (names.py)
    renamed        tensors that this architecture names differently
    kv_b           (heads, nope, value) of a kv_b_proj that is split
    """

    architecture: str
    keys: Mapping[str, Value]
    moe_layers: Sequence[int]
    copies_embedding: bool = False
    paired: Mapping[str, int] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    kv_b: tuple[int, int, int] | None = None
    notes: tuple[str, ...] = ()


def written(model_type: str, config: Any) -> Written:
    """Return the description of a model of this family and checked config.

    Raises CannotExport for a family without a counterpart, or for a switch that llama.cpp ignores.
    """
    describe = _FAMILIES.get(model_type)
    if describe is None:
        known = ", ".join(sorted(_FAMILIES))
        raise CannotExport(f"{model_type}: the family cannot be exported as GGUF (only {known})")
    return describe(config)


def _refuse(model_type: str, switches: Mapping[str, bool]) -> None:
    """Raise CannotExport for the first switch that is on."""
    for words, on in switches.items():
        if on:
            raise CannotExport(f"{model_type}: llama.cpp ignores {words}, so answers would differ")


def _sizes(body: BodyConfig, moe: MoeShape) -> dict[str, Value]:
    return {
        "block_count": body.layers,
        "context_length": body.max_context,
        "embedding_length": body.hidden,
        "vocab_size": body.vocab,
        "attention.head_count": body.heads,
        "attention.layer_norm_rms_epsilon": float(body.norm_eps),
        "expert_count": moe.experts,
        "expert_used_count": moe.top_k,
    }


def _heads(shape: GqaShape) -> dict[str, Value]:
    return {
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
    }


def _rope(model_type: str, rope: RopeConfig, dimensions: int) -> dict[str, Value]:
    """Return the keys of the rotary embedding. llama.cpp has yarn's usual factor built in."""
    keys: dict[str, Value] = {
        "rope.freq_base": float(rope.theta),
        "rope.dimension_count": dimensions,
    }
    if rope.kind == "default":
        return keys
    if rope.kind not in ("linear", "yarn"):
        raise CannotExport(f"{model_type}: rope type {rope.kind!r} cannot be exported as GGUF")
    keys |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": float(rope.factor)}
    if rope.kind == "linear":
        return keys
    keys |= {
        "rope.scaling.original_context_length": rope.original_context,
        "rope.scaling.yarn_beta_fast": float(rope.beta_fast),
        "rope.scaling.yarn_beta_slow": float(rope.beta_slow),
    }
    if rope.attention_factor is not None:  # as llama.cpp's conversion writes it; not used there
        keys["rope.scaling.yarn_attn_factor"] = float(rope.attention_factor)
    left = attention_factor(rope) / (0.1 * math.log(rope.factor) + 1)
    if not math.isclose(left, 1):
        keys["rope.scaling.attn_factor"] = left
    return keys


def _rounding(rope: RopeConfig) -> tuple[str, ...]:
    if rope.kind != "yarn" or rope.truncate:
        return ()
    return (
        "llama.cpp rounds the ends of yarn's ramp, this model does not: logits differ a little",
    )


def _inner_norms(body: BodyConfig) -> tuple[str, ...]:
    if body.norm_eps == 1e-6:
        return ()
    return ("llama.cpp uses rms_norm_eps in the norms of latents, this model 1e-6",)


def _windowed(shape: GqaShape, body: BodyConfig) -> bool:
    return shape.window is not None and shape.window < body.max_context


def _olmoe(config: OlmoeConfig) -> Written:
    body, shape, moe = config.body, config.attention, config.moe
    _refuse(
        "olmoe",
        {
            "attention_bias": shape.bias,
            "clip_qkv": shape.clip is not None,
            "norm_topk_prob": config.renormalise,
            "num_key_value_heads": shape.kv_heads != shape.heads,
        },
    )
    keys = _sizes(body, moe) | _heads(shape) | _rope("olmoe", body.rope, shape.head_dim)
    keys["feed_forward_length"] = moe.intermediate
    return Written(
        "olmoe",
        keys,
        range(body.layers),
        copies_embedding=body.tied_embeddings,
        notes=_rounding(body.rope),
    )


def _qwen3_moe(config: Qwen3MoeConfig) -> Written:
    body, shape, moe = config.body, config.attention, config.moe
    _refuse(
        "qwen3_moe",
        {
            "attention_bias": shape.bias,
            "sliding_window": _windowed(shape, body),
            "norm_topk_prob = false": not config.renormalise,
            "layers without experts": moe.layers < body.layers,
        },
    )
    keys = _sizes(body, moe) | _heads(shape) | _rope("qwen3_moe", body.rope, shape.head_dim)
    keys["expert_feed_forward_length"] = moe.intermediate
    return Written("qwen3moe", keys, range(body.layers), notes=_rounding(body.rope))


def _mixtral(config: MixtralConfig) -> Written:
    body, shape, moe = config.body, config.attention, config.moe
    _refuse("mixtral", {"sliding_window": _windowed(shape, body)})
    keys = _sizes(body, moe) | _heads(shape) | _rope("mixtral", body.rope, shape.head_dim)
    keys["feed_forward_length"] = moe.intermediate
    return Written(
        "llama",
        keys,
        range(body.layers),
        paired={"attn_q": shape.heads, "attn_k": shape.kv_heads},
        notes=_rounding(body.rope),
    )


def _gpt_oss(config: GptOssConfig) -> Written:
    body, shape, moe = config.body, config.attention[0], config.moe
    windows = {layer.window for layer in config.attention[::2]}
    alternate = len(windows) == 1 and None not in windows
    _refuse(
        "gpt_oss",
        {
            "attention_bias = false": not shape.bias,
            "layer_types": not alternate or any(layer.window for layer in config.attention[1::2]),
        },
    )
    assert shape.window is not None
    keys = _sizes(body, moe) | _heads(shape) | _rope("gpt_oss", body.rope, shape.head_dim)
    keys["expert_feed_forward_length"] = moe.intermediate
    keys["attention.sliding_window"] = shape.window
    return Written(
        "gpt-oss",
        keys,
        range(body.layers),
        copies_embedding=body.tied_embeddings,
        renamed={"ffn_norm": "post_attention_norm"},
        notes=_rounding(body.rope),
    )


def _qwen2_moe(config: Qwen2MoeConfig) -> Written:
    body, shape, moe = config.body, config.attention, config.moe
    _refuse(
        "qwen2_moe",
        {
            "sliding_window": bool(config.sliding) and _windowed(shape, body),
            "norm_topk_prob": config.renormalise,
            "layers without experts": moe.layers < body.layers,
            "head_dim": shape.heads * shape.head_dim != body.hidden,
        },
    )
    keys = _sizes(body, moe) | _heads(shape) | _rope("qwen2_moe", body.rope, shape.head_dim)
    keys["expert_feed_forward_length"] = moe.intermediate
    keys["expert_shared_feed_forward_length"] = config.shared_intermediate
    return Written(
        "qwen2moe",
        keys,
        range(body.layers),
        copies_embedding=body.tied_embeddings,
        notes=_rounding(body.rope),
    )


def _latent(
    model_type: str, body: BodyConfig, shape: MlaShape, plan: FfnPlan, shared: int, scale: float
) -> dict[str, Value]:
    """Return the keys of latent attention and DeepSeek's experts. Raises CannotExport."""
    rope, first = body.rope, plan.sparse_layers[0]
    yarn = rope.kind == "yarn"
    _refuse(
        model_type,
        {
            "attention_bias": shape.bias,
            "moe_layer_freq": list(plan.sparse_layers) != list(range(first, body.layers)),
            "attention_factor": rope.attention_factor is not None,
            "an mscale other than mscale_all_dim": yarn and rope.mscale != rope.mscale_all_dim,
            "yarn without mscale_all_dim": yarn and not rope.mscale_all_dim,
            "n_shared_experts = 0": not shared,
        },
    )
    keys = _sizes(body, plan.moe) | _rope(model_type, rope, shape.rope)
    if yarn:
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * (rope.mscale_all_dim or 0.0)
        keys.pop("rope.scaling.attn_factor", None)  # llama.cpp divides by it here
    if plan.dense_intermediate is not None:
        keys["feed_forward_length"] = plan.dense_intermediate
    if body.layers not in _LITE_LAYERS or shape.q_lora is not None:
        keys["attention.q_lora_rank"] = shape.q_lora or 0
    return keys | {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": shape.kv_lora,
        "attention.key_length": shape.kv_lora + shape.rope,
        "attention.value_length": shape.kv_lora,
        "attention.key_length_mla": shape.nope + shape.rope,
        "attention.value_length_mla": shape.value,
        "leading_dense_block_count": first,
        "expert_feed_forward_length": plan.moe.intermediate,
        "expert_shared_count": shared,
        "expert_weights_scale": float(scale),
    }


def _deepseek_v2(config: DeepseekV2Config) -> Written:
    body, shape, plan = config.body, config.attention, config.ffn
    _refuse("deepseek_v2", {"topk_method = group_limited_greedy": config.groups is not None})
    keys = _latent("deepseek_v2", body, shape, plan, config.shared_experts, config.routed_scale)
    keys["expert_gating_func"] = _SOFTMAX
    return Written(
        "deepseek2",
        keys,
        plan.sparse_layers,
        kv_b=(shape.heads, shape.nope, shape.value),
        notes=(*_rounding(body.rope), *_inner_norms(body)),
    )


def _sigmoid(ffn: SigmoidExperts) -> dict[str, Value]:
    """Return the keys of experts chosen by sigmoid scores."""
    keys: dict[str, Value] = {
        "expert_gating_func": _SIGMOID,
        "expert_weights_norm": ffn.renormalise,
        "expert_weights_scale": float(ffn.scale),
    }
    if ffn.groups is not None:
        keys["expert_group_count"], keys["expert_group_used_count"] = ffn.groups
    return keys


def _deepseek_v3(config: DeepseekV3Config, model_type: str = "deepseek_v3") -> Written:
    body, shape, ffn = config.body, config.attention, config.ffn
    keys = _latent(model_type, body, shape, ffn.plan, ffn.shared_experts, ffn.scale)
    return Written(
        "deepseek2",
        keys | _sigmoid(ffn),
        ffn.plan.sparse_layers,
        kv_b=(shape.heads, shape.nope, shape.value),
        notes=(*_rounding(body.rope), *_inner_norms(body)),
    )


def _granitemoe(config: GraniteMoeConfig) -> Written:
    body, shape, moe = config.body, config.attention, config.moe
    _refuse("granitemoe", {"attention_bias": shape.bias})
    keys = _sizes(body, moe) | _heads(shape) | _rope("granitemoe", body.rope, shape.head_dim)
    return Written(
        "granitemoe",
        keys
        | {
            "feed_forward_length": moe.intermediate,
            "attention.scale": float(shape.softmax_scale),
            "embedding_scale": float(body.embedding_scale),
            "residual_scale": float(config.residual),
            "logit_scale": float(body.logits_scale),
        },
        range(body.layers),
        paired={"attn_q": shape.heads, "attn_k": shape.kv_heads},
        notes=_rounding(body.rope),
    )


def _glm4_moe(config: Glm4MoeConfig) -> Written:
    body, shape, ffn = config.body, config.attention, config.ffn
    plan = ffn.plan
    keys = _sizes(body, plan.moe) | _heads(shape) | _rope("glm4_moe", body.rope, config.turning)
    if plan.dense_intermediate is not None:
        keys["feed_forward_length"] = plan.dense_intermediate
    keys |= {
        "leading_dense_block_count": plan.sparse_layers[0],
        "expert_feed_forward_length": plan.moe.intermediate,
        "expert_shared_count": ffn.shared_experts,
    }
    return Written(
        "glm4moe",
        keys | _sigmoid(ffn),
        plan.sparse_layers,
        renamed={"ffn_norm": "post_attention_norm"},
        notes=_rounding(body.rope),
    )


_FAMILIES: dict[str, Callable[[Any], Written]] = {
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "qwen2_moe": _qwen2_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "granitemoe": _granitemoe,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": partial(_deepseek_v3, model_type="glm4_moe_lite"),
    "olmoe": _olmoe,
}
