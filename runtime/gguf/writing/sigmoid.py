"""Describe models whose layers are GLM-4.5's: grouped attention, experts by sigmoid scores."""

from __future__ import annotations

from moeinf.models.layers.sigmoid_decoder import SigmoidGqaConfig
from moeinf.models.layers.sigmoid_experts import SigmoidExperts
from moeinf.runtime.gguf.writing.description import (
    SIGMOID,
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
from moeinf.runtime.gguf.writing.writer import Value


def sigmoid_keys(ffn: SigmoidExperts) -> dict[str, Value]:
    """Return the keys of experts chosen by sigmoid scores."""
    keys: dict[str, Value] = {
        "expert_gating_func": SIGMOID,
        "expert_weights_norm": ffn.renormalise,
        "expert_weights_scale": float(ffn.scale),
    }
    if ffn.groups is not None:
        keys["expert_group_count"], keys["expert_group_used_count"] = ffn.groups
    return keys


def glm4(model_type: str, config: SigmoidGqaConfig) -> Written:
    """Describe GLM-4.5, or Solar-Open, which llama.cpp runs as the same architecture."""
    return Written(
        "glm4moe",
        _keys(model_type, config),
        config.ffn.plan.sparse_layers,
        notes=rounding(config.body.rope),
    )


def dots1(config: SigmoidGqaConfig) -> Written:
    """Describe dots.llm1. llama.cpp has no windows in it, and as many key heads as query heads."""
    shape = config.attention[0]
    windows = any(one.window is not None for one in config.attention)
    refuse(
        "dots1",
        {
            "attention_bias": shape.bias,
            "sliding_window": windows,
            "num_key_value_heads": shape.kv_heads != shape.heads,
            **_layers(config),
        },
    )
    return Written(
        "dots1",
        _keys("dots1", config),
        config.ffn.plan.sparse_layers,
        copies_embedding=config.body.tied_embeddings,
        notes=rounding(config.body.rope),
    )


def exaone(config: SigmoidGqaConfig) -> Written:
    """Describe K-EXAONE, in which the layers with a window rotate."""
    refuse("exaone_moe", _layers(config))
    refuse("exaone_moe", {"layer_types without a window": not sliding(config.attention)})
    shared = config.ffn.shared_experts * config.ffn.plan.moe.intermediate
    return Written(
        "exaone-moe",
        _keys("exaone_moe", config)
        | sliding(config.attention)
        | {"expert_shared_feed_forward_length": shared},
        config.ffn.plan.sparse_layers,
        copies_embedding=config.body.tied_embeddings,
        notes=rounding(config.body.rope),
    )


def _layers(config: SigmoidGqaConfig) -> dict[str, bool]:
    """Return the switches of layers that llama.cpp reads in one form only."""
    return {
        "n_shared_experts = 0": not config.ffn.shared_experts,
        "dense layers behind those with experts": scattered(config.ffn.plan, config.body),
    }


def _keys(model_type: str, config: SigmoidGqaConfig) -> dict[str, Value]:
    body, ffn = config.body, config.ffn
    return (
        sizes(body, ffn.plan.moe)
        | heads(config.attention[0])
        | rope_keys(model_type, body.rope, config.turning)
        | ffn_sizes(ffn.plan)
        | {"expert_shared_count": ffn.shared_experts}
        | sigmoid_keys(ffn)
    )
