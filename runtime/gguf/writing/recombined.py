"""Describe models in which known attention and known routers are combined."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moeinf.models.ernie4_5_moe import Ernie45MoeConfig
from moeinf.models.hunyuan_v1_moe import HunyuanMoeConfig
from moeinf.models.laguna import LagunaConfig
from moeinf.models.minimax_m2 import MinimaxM2Config
from moeinf.runtime.gguf.writing.description import (
    SIGMOID,
    SOFTMAX,
    Place,
    Shape,
    Written,
    ffn_sizes,
    heads,
    refuse,
    rope_keys,
    rounding,
    scattered,
    sizes,
    sliding,
)


def minimax(config: MinimaxM2Config) -> Written:
    """Describe MiniMax-M2."""
    body, shape, moe = config.body, config.attention, config.moe
    turning = body.rope.turning(shape.head_dim)
    return Written(
        "minimax-m2",
        sizes(body, moe)
        | heads(shape)
        | rope_keys("minimax_m2", body.rope, turning)
        | {
            "feed_forward_length": moe.intermediate,
            "expert_feed_forward_length": moe.intermediate,
            "expert_gating_func": SIGMOID,
        },
        range(body.layers),
        copies_embedding=body.tied_embeddings,
        notes=rounding(body.rope),
    )


def ernie(config: Ernie45MoeConfig) -> Written:
    """Describe ERNIE-4.5. llama.cpp loads experts for every layer behind the first dense ones."""
    body, shape, plan = config.body, config.attention, config.ffn
    refuse("ernie4_5_moe", {"moe_layer_interval": scattered(plan, body)})
    return Written(
        "ernie4_5-moe",
        sizes(body, plan.moe)
        | heads(shape)
        | rope_keys("ernie4_5_moe", body.rope, shape.head_dim)
        | ffn_sizes(plan)
        | {
            "interleave_moe_layer_step": 1,
            "expert_gating_func": SOFTMAX,
            "expert_shared_count": config.shared_experts,
            "expert_shared_feed_forward_length": config.shared_experts * plan.moe.intermediate,
        },
        plan.sparse_layers,
        made={"mlp.moe_statics.e_score_correction_bias": _vector},
        notes=rounding(body.rope),
    )


def _vector(shape: Shape) -> tuple[Place, ...]:
    return (Place("exp_probs_b.bias", shape[-1:], exact=True),)


def hunyuan(config: HunyuanMoeConfig) -> Written:
    """Describe Hunyuan-A13B, with theta stretched by alpha as llama.cpp's converter does."""
    body, shape, moe, rope = config.body, config.attention, config.moe, config.body.rope
    refuse("hunyuan_v1_moe", {"attention_bias": shape.bias})
    theta = rope.theta * rope.alpha ** (shape.head_dim / (shape.head_dim - 2))
    return Written(
        "hunyuan-moe",
        sizes(body, moe)
        | heads(shape)
        | rope_keys("hunyuan_v1_moe", replace(rope, theta=theta, alpha=1.0), shape.head_dim)
        | {
            "feed_forward_length": moe.intermediate,
            "expert_feed_forward_length": moe.intermediate,
            "expert_shared_feed_forward_length": moe.intermediate,
            "expert_shared_count": 1,
        },
        range(body.layers),
        notes=rounding(rope),
    )


def laguna(config: LagunaConfig) -> Written:
    """Describe Laguna, whose layers differ in their heads, ropes and windows."""
    body, shape, plan = config.body, config.attention[0], config.ffn
    windows = sliding(config.attention)
    refuse(
        "laguna",
        {
            "attention_bias": shape.bias,
            "moe_router_logit_softcapping": config.softcap > 0,
            "dense layers behind those with experts": scattered(plan, body),
            "a rope scaling of layers with a window": config.sliding_rope.kind != "default",
        },
    )
    keys = sizes(body, plan.moe) | heads(shape) | windows
    keys["attention.head_count"] = np.array([one.heads for one in config.attention], "<i4")
    if windows:
        keys["rope.freq_base_swa"] = float(config.sliding_rope.theta)
        keys["rope.dimension_count_swa"] = config.sliding_rope.turning(shape.head_dim)
    return Written(
        "laguna",
        keys
        | rope_keys("laguna", body.rope, body.rope.turning(shape.head_dim))
        | ffn_sizes(plan)
        | {
            "expert_shared_count": 1,
            "expert_shared_feed_forward_length": config.shared_intermediate,
            "expert_gating_func": SIGMOID,
            "expert_weights_norm": True,
            "expert_weights_scale": float(config.scale),
        },
        plan.sparse_layers,
        notes=rounding(body.rope),
    )
