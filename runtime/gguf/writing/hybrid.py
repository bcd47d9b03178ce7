"""Describe Granite, and models of Mamba2 or of short convolutions beside attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moeinf.models.granitemoe import GraniteMoeConfig
from moeinf.models.granitemoehybrid import GraniteMoeHybridConfig
from moeinf.models.layers.mamba2 import MambaShape
from moeinf.models.lfm2_moe import Lfm2MoeConfig
from moeinf.models.nemotron_h import NemotronHConfig
from moeinf.runtime.gguf.writing.delta_net import numbers
from moeinf.runtime.gguf.writing.description import (
    SIGMOID,
    Make,
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
    stretched,
)
from moeinf.runtime.gguf.writing.writer import Value


def granitemoe(model_type: str, config: GraniteMoeConfig) -> Written:
    """Describe Granite with experts in every layer."""
    body, shape, moe = config.body, config.attention, config.moe
    refuse(model_type, {"attention_bias": shape.bias})
    keys = sizes(body, moe) | heads(shape) | rope_keys(model_type, body.rope, shape.head_dim, True)
    if config.shared:
        keys["expert_shared_feed_forward_length"] = config.shared
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
        made={"shared_mlp.input_linear.weight": _halves},
        factors=stretched(body.rope, shape.head_dim),
        notes=rounding(body.rope),
    )


def _halves(shape: Shape) -> tuple[Place, ...]:
    """Split the fused rows of a shared expert's gate and up."""
    half = shape[0] // 2
    return (
        Place("ffn_gate_shexp.weight", (half, shape[1]), change=lambda rows: rows[:half]),
        Place("ffn_up_shexp.weight", (half, shape[1]), change=lambda rows: rows[half:]),
    )


def granite_hybrid(config: GraniteMoeHybridConfig) -> Written:
    """Describe Granite 4.0-H. A layer without key heads is Mamba2."""
    body, mamba = config.body, config.mamba
    refuse(
        "granitemoehybrid",
        {"mamba_proj_bias": mamba.bias, "mamba_expand": mamba.inner != 2 * body.hidden},
    )
    about = granitemoe("granitemoehybrid", config)
    return replace(
        about,
        architecture="granitehybrid",
        keys={
            **about.keys,
            **_mamba_keys(mamba),
            "attention.head_count_kv": _in_layers(
                config.attention.kv_heads, config.full, body.layers
            ),
            "rope.scaling.finetuned": config.rotated,  # whether heads rotate at all
        },
        made={**about.made, **_mamba_tensors(mamba, "mamba")},
    )


def nemotron(config: NemotronHConfig) -> Written:
    """Describe Nemotron-3. A layer without key heads and without experts is Mamba2."""
    body, shape, moe, mamba = config.body, config.attention, config.moe, config.mamba
    sparse = config.layers("moe")
    refuse(
        "nemotron_h",
        {"mlp layers": "mlp" in config.kinds, "use_bias": mamba.bias, "mlp_bias": config.mlp_bias},
    )
    keys = sizes(body, moe) | heads(shape) | _mamba_keys(mamba)
    if config.groups is not None:
        keys["expert_group_count"], keys["expert_group_used_count"] = config.groups
    if moe.width:
        keys["moe_latent_size"] = moe.hidden
    return Written(
        "nemotron_h_moe",
        keys
        | {
            "attention.layer_norm_epsilon": float(body.norm_eps),
            "attention.head_count_kv": _in_layers(
                shape.kv_heads, config.layers("attention"), body.layers
            ),
            "feed_forward_length": _in_layers(moe.intermediate, sparse, body.layers),
            "rope.freq_base": float(body.rope.theta),
            "expert_feed_forward_length": moe.intermediate,
            "expert_shared_count": 1,
            "expert_shared_feed_forward_length": config.shared_intermediate,
            "expert_gating_func": SIGMOID,
            "expert_weights_norm": config.renormalise,
            "expert_weights_scale": float(config.scale),
        },
        sparse,
        made=_mamba_tensors(mamba, "mixer"),
    )


def lfm2(config: Lfm2MoeConfig) -> Written:
    """Describe LFM2. A layer without key heads is a short convolution."""
    body, shape, plan = config.body, config.attention, config.ffn
    refuse(
        "lfm2_moe",
        {
            "conv_bias": config.conv_bias,
            "use_expert_bias = false": not config.expert_bias,
            "norm_topk_prob = false": not config.renormalise,
            "head_dim": shape.heads * shape.head_dim != body.hidden,
            "dense layers behind those with experts": scattered(plan, body),
        },
    )
    return Written(
        "lfm2moe",
        sizes(body, plan.moe)
        | heads(shape)
        | rope_keys("lfm2_moe", body.rope, shape.head_dim)
        | ffn_sizes(plan)
        | {
            "attention.head_count_kv": _in_layers(shape.kv_heads, config.full, body.layers),
            "shortconv.l_cache": config.kernel,
            "expert_gating_func": SIGMOID,
            "expert_weights_scale": float(config.scale),
        },
        plan.sparse_layers,
        made={
            "model.norm.weight": lambda sides: (Place("token_embd_norm.weight", sides),),
            "conv.conv.weight": lambda sides: (
                Place("shortconv.conv.weight", (sides[0], sides[-1]), exact=True),
            ),
        },
        notes=rounding(body.rope),
    )


def _in_layers(value: int, layers: Sequence[int], count: int) -> NDArray[np.int32]:
    """Return the value for some layers, and 0 for the others."""
    return np.array([value * (layer in layers) for layer in range(count)], "<i4")


def _mamba_keys(shape: MambaShape) -> dict[str, Value]:
    return {
        "ssm.conv_kernel": shape.kernel,
        "ssm.state_size": shape.state,
        "ssm.group_count": shape.groups,
        "ssm.time_step_rank": shape.heads,
        "ssm.inner_size": shape.inner,
    }


def _mamba_tensors(shape: MambaShape, prefix: str) -> dict[str, Make]:
    """Return the tensors of Mamba2 that are not written as they are stored."""
    column = shape.heads, 1

    def plain(to: str, sides: Shape) -> Make:
        return lambda stored: (Place(to, sides, exact=True),)

    return {
        f"{prefix}.A_log": numbers("ssm_a", lambda stored: -np.exp(stored), column),
        f"{prefix}.D": plain("ssm_d", column),
        f"{prefix}.dt_bias": plain("ssm_dt.bias", (shape.heads,)),
        f"{prefix}.conv1d.weight": plain("ssm_conv1d.weight", (shape.channels, shape.kernel)),
        f"{prefix}.norm.weight": plain(
            "ssm_norm.weight", (shape.groups, shape.inner // shape.groups)
        ),
    }
