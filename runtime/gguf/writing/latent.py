"""Describe latent attention, and split its kv_b projection as llama.cpp stores it."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from moeinf.models.deepseek_v2 import DeepseekV2Config
from moeinf.models.deepseek_v3 import DeepseekV3Config
from moeinf.models.deepseek_v32 import DeepseekV32Config
from moeinf.models.kimi_linear import KimiLinearConfig
from moeinf.models.layers.decoder import BodyConfig
from moeinf.models.layers.feed_forward import FfnPlan
from moeinf.models.layers.mla import MlaShape
from moeinf.models.mistral4 import Mistral4Config
from moeinf.runtime.gguf.writing.delta_net import numbers
from moeinf.runtime.gguf.writing.description import (
    SOFTMAX,
    Bytes,
    Change,
    Make,
    Place,
    Shape,
    Written,
    ffn_sizes,
    flags,
    refuse,
    rope_keys,
    rounding,
    scattered,
    sizes,
)
from moeinf.runtime.gguf.writing.sigmoid import sigmoid_keys
from moeinf.runtime.gguf.writing.writer import Value

_LITE_LAYERS = (26, 27)  # llama.cpp takes these for DeepSeek-V2-Lite, without q_lora_rank


def latent_keys(
    model_type: str, body: BodyConfig, shape: MlaShape, plan: FfnPlan, shared: int, scale: float
) -> dict[str, Value]:
    """Return the keys of latent attention and DeepSeek's experts. Raises CannotExport."""
    rope = body.rope
    yarn = rope.kind == "yarn"
    refuse(
        model_type,
        {
            "attention_bias": shape.bias,
            "moe_layer_freq": scattered(plan, body),
            "attention_factor": rope.attention_factor is not None,
            "an mscale other than mscale_all_dim": yarn and rope.mscale != rope.mscale_all_dim,
            "yarn without mscale_all_dim": yarn and not rope.mscale_all_dim,
            "n_shared_experts = 0": not shared,
        },
    )
    keys = sizes(body, plan.moe) | rope_keys(model_type, rope, shape.rope)
    if yarn:
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * (rope.mscale_all_dim or 0.0)
        keys.pop("rope.scaling.attn_factor", None)  # llama.cpp divides by it here
    if body.layers not in _LITE_LAYERS or shape.q_lora is not None:
        keys["attention.q_lora_rank"] = shape.q_lora or 0
    return keys | {
        "attention.head_count_kv": 1,
        **mla_keys(shape),
        **ffn_sizes(plan),
        "expert_shared_count": shared,
        "expert_weights_scale": float(scale),
    }


def mla_keys(shape: MlaShape) -> dict[str, Value]:
    """Return the widths of latents, and of heads made of them."""
    return {
        "attention.kv_lora_rank": shape.kv_lora,
        "attention.key_length": shape.kv_lora + shape.rope,
        "attention.value_length": shape.kv_lora,
        "attention.key_length_mla": shape.nope + shape.rope,
        "attention.value_length_mla": shape.value,
    }


def inner_norms(body: BodyConfig) -> tuple[str, ...]:
    """Return a note where llama.cpp's norms of latents differ."""
    if body.norm_eps == 1e-6:
        return ()
    return ("llama.cpp uses rms_norm_eps in the norms of latents, this model 1e-6",)


def split_kv_b(latent: MlaShape) -> dict[str, Make]:
    """Divide kv_b_proj [heads · (nope + value), width] into keys, transposed, and values."""
    heads, nope, value = latent.heads, latent.nope, latent.value

    def make(shape: Shape) -> tuple[Place, ...]:
        width = shape[1]

        def part(which: Literal["k", "v"]) -> Change:
            def change(rows: Bytes) -> Bytes:
                both = rows.reshape(heads, nope + value, width, -1)
                if which == "v":
                    return both[:, nope:].reshape(heads * value, -1)
                return both[:, :nope].swapaxes(1, 2).reshape(heads * width, -1)

            return change

        return (
            Place("attn_k_b.weight", (heads, width, nope), change=part("k")),
            Place("attn_v_b.weight", (heads, value, width), change=part("v")),
        )

    return {"self_attn.kv_b_proj.weight": make}


def deepseek_v2(config: DeepseekV2Config) -> Written:
    """Describe DeepSeek-V2, whose experts llama.cpp chooses without groups."""
    body, shape, plan = config.body, config.attention, config.ffn
    refuse("deepseek_v2", {"topk_method = group_limited_greedy": config.groups is not None})
    keys = latent_keys("deepseek_v2", body, shape, plan, config.shared_experts, config.routed_scale)
    keys["expert_gating_func"] = SOFTMAX
    return Written(
        "deepseek2",
        keys,
        plan.sparse_layers,
        made=split_kv_b(shape),
        notes=(*rounding(body.rope), *inner_norms(body)),
    )


def deepseek_v3(
    model_type: str, config: DeepseekV3Config, architecture: str = "deepseek2"
) -> Written:
    """Describe DeepSeek-V3, or a model with its layers."""
    body, shape, ffn = config.body, config.attention, config.ffn
    keys = latent_keys(model_type, body, shape, ffn.plan, ffn.shared_experts, ffn.scale)
    return Written(
        architecture,
        keys | sigmoid_keys(ffn),
        ffn.plan.sparse_layers,
        made=split_kv_b(shape),
        notes=(*rounding(body.rope), *inner_norms(body)),
    )


def v32(config: DeepseekV32Config) -> Written:
    """Describe DeepSeek-V3.2."""
    about = deepseek_v3("deepseek_v32", config, "deepseek32")
    return replace(about, keys={**about.keys, **_indexer_keys(config)})


def glm_dsa(config: DeepseekV32Config) -> Written:
    """Describe GLM-5, whose layers may use the indexer of an earlier one."""
    about = deepseek_v3("glm_moe_dsa", config, "glm-dsa")
    own = flags(layer in config.indexed for layer in range(config.body.layers))
    keys = {**about.keys, **_indexer_keys(config), "attention.indexer.types": own}
    return replace(about, keys=keys)


def _indexer_keys(config: DeepseekV32Config) -> dict[str, Value]:
    return {
        "attention.indexer.head_count": config.indexer.heads,
        "attention.indexer.key_length": config.indexer.width,
        "attention.indexer.top_k": config.indexer.top,
    }


def mistral4(config: Mistral4Config) -> Written:
    """Describe Mistral Small 4. llama.cpp's converter leaves out the scale of queries."""
    body, shape, plan = config.body, config.attention, config.ffn
    refuse("mistral4", {"n_group": config.groups is not None})
    keys = latent_keys("mistral4", body, shape, plan, config.shared_experts, config.scale)
    return Written(
        "mistral4",
        keys
        | {
            "expert_gating_func": SOFTMAX,
            "expert_weights_norm": config.renormalise,
            "attention.temperature_scale": float(config.scaling.beta),
            "attention.temperature_length": config.scaling.original,
        },
        plan.sparse_layers,
        made=split_kv_b(shape),
        notes=(*rounding(body.rope), *inner_norms(body)),
    )


def kimi_linear(config: KimiLinearConfig) -> Written:
    """Describe Kimi-Linear. A layer without key heads is Kimi Delta Attention."""
    body, shape, ffn, delta = config.body, config.attention, config.ffn, config.delta
    refuse(
        "kimi_linear",
        {
            "attention_bias": shape.bias,
            "linear_num_heads": delta.key_heads != body.heads,
            "norm_topk_prob = false": not ffn.renormalise,
            "n_shared_experts = 0": not ffn.shared_experts,
            "dense layers behind those with experts": scattered(ffn.plan, body),
        },
    )
    keys: dict[str, Value] = {} if shape.q_lora is None else {"attention.q_lora_rank": shape.q_lora}
    return Written(
        "kimi-linear",
        sizes(body, ffn.plan.moe)
        | keys
        | mla_keys(shape)
        | ffn_sizes(ffn.plan)
        | {
            "attention.head_count_kv": flags(layer in config.full for layer in range(body.layers)),
            "rope.dimension_count": shape.rope,
            "ssm.conv_kernel": delta.kernel,
            "kda.head_dim": delta.key_dim,
            "expert_shared_count": ffn.shared_experts,
        }
        | sigmoid_keys(ffn),
        ffn.plan.sparse_layers,
        made=split_kv_b(shape) | kimi_tensors((delta.key_heads, 1)),
        notes=inner_norms(body),
    )


def kimi_tensors(rates: Shape) -> dict[str, Make]:
    """Return the tensors of Kimi Delta Attention; rates: the shape of decay rates in the file."""
    return {
        "self_attn.A_log": numbers("ssm_a", lambda stored: -np.exp(stored), rates),
        "self_attn.dt_bias": lambda sides: (Place("ssm_dt.bias", sides, True),),
        **{f"self_attn.{word}_conv1d.weight": _kernel(word) for word in "qkv"},
    }


def _kernel(word: str) -> Make:
    return lambda sides: (Place(f"ssm_conv1d_{word}.weight", sides, True),)
