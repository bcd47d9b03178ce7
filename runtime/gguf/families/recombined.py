"""The keys and names of models in which known attention and known routers are combined."""

from __future__ import annotations

from typing import Any

from moeinf.runtime.gguf.families.usual import (
    ATTENTION,
    MLP,
    SHARED,
    SIGMOID,
    body,
    sigmoid_experts,
)
from moeinf.runtime.gguf.keys import Keys
from moeinf.runtime.gguf.made import Made

_Sides = tuple[int, ...]
_KINDS = {True: "sliding_attention", False: "full_attention"}

MINIMAX_NAMES = {
    **ATTENTION,
    "ffn_gate_inp": "block_sparse_moe.gate",
    "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
}
HUNYUAN_NAMES = {
    **ATTENTION,
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
    "ffn_gate_inp": "mlp.gate.wg",
    **{f"ffn_{role}_shexp": f"mlp.shared_mlp.{role}_proj" for role in ("gate", "up", "down")},
}
ERNIE_NAMES = {
    name: ours for name, ours in (ATTENTION | MLP | SIGMOID).items() if name != "exp_probs_b.bias"
}
LAGUNA_NAMES = {
    **(ATTENTION | MLP | SHARED),
    "attn_gate": "self_attn.g_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}


def _row(_keys: Keys, sides: _Sides) -> tuple[_Sides, Any]:
    shape = 1, sides[-1]
    return shape, lambda values: values.view(shape)


ERNIE_MADE = {"mlp.moe_statics.e_score_correction_bias": Made(("exp_probs_b.bias",), _row)}


def minimax_config(keys: Keys) -> dict[str, Any]:
    """Return config.json of MiniMax-M2."""
    return body(keys, "minimax_m2") | {
        "intermediate_size": keys.get("expert_feed_forward_length"),
        "num_local_experts": keys.get("expert_count"),
        "rope_parameters": keys.partial_rope(),
    }


def dots1_config(keys: Keys) -> dict[str, Any]:
    """Return config.json of dots.llm1. A file has no windows, and no published model has one."""
    kinds = [_KINDS[False]] * keys.layers
    return body(keys, "dots1") | sigmoid_experts(keys) | {"layer_types": kinds}


def ernie_config(keys: Keys) -> dict[str, Any]:
    """Return config.json of ERNIE-4.5."""
    return body(keys, "ernie4_5_moe") | {
        "intermediate_size": keys.get("feed_forward_length"),
        "moe_intermediate_size": keys.get("expert_feed_forward_length"),
        "moe_num_experts": keys.get("expert_count"),
        "moe_num_shared_experts": keys.get("expert_shared_count") or 0,
        "moe_layer_start_index": keys.get("leading_dense_block_count") or 0,
        "moe_layer_interval": keys.get("interleave_moe_layer_step"),
    }


def hunyuan_config(keys: Keys) -> dict[str, Any]:
    """Return config.json of Hunyuan-A13B; the file's theta is stretched by alpha already."""
    return body(keys, "hunyuan_v1_moe") | {
        "intermediate_size": keys.get("feed_forward_length"),
        "num_experts": keys.get("expert_count"),
    }


def exaone_config(keys: Keys) -> dict[str, Any]:
    """Return config.json of K-EXAONE."""
    return (
        body(keys, "exaone_moe")
        | sigmoid_experts(keys)
        | {"sliding_window": keys.get("attention.sliding_window"), "layer_types": _kinds(keys)}
    )


def laguna_config(keys: Keys) -> dict[str, Any]:
    """Return config.json of Laguna. Layers differ in their heads, ropes and windows."""
    heads = _heads(keys)
    width = keys.count("attention.key_length")
    gates = keys.side("attn_gate.weight", 0)
    window = keys.get("attention.sliding_window") or None
    kinds = [_KINDS[False]] * keys.layers if window is None else _kinds(keys)
    theta, turned = keys.get("rope.freq_base_swa"), keys.get("rope.dimension_count_swa")
    sliding: dict[str, Any] = {"rope_theta": keys.rope()["rope_theta"] if theta is None else theta}
    if turned is not None:
        sliding["partial_rotary_factor"] = keys.count("rope.dimension_count_swa") / width
    sparse = [keys.has_tensor("ffn_gate_inp.weight", block) for block in range(keys.layers)]
    return body(keys, "laguna") | {
        "num_attention_heads": heads[0],
        "num_attention_heads_per_layer": heads,
        "attention_bias": keys.has_tensor("attn_output.bias"),
        "gating": "per-head" if gates == heads[0] else "per-element",
        "intermediate_size": keys.get("feed_forward_length"),
        "moe_intermediate_size": keys.get("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.side("ffn_down_shexp.weight", -1),
        "num_experts": keys.get("expert_count"),
        "moe_routed_scaling_factor": keys.get("expert_weights_scale") or 1.0,
        "sliding_window": window,
        "layer_types": kinds,
        "mlp_layer_types": ["sparse" if one else "dense" for one in sparse],
        "rope_parameters": {"full_attention": keys.partial_rope(), "sliding_attention": sliding},
    }


def _heads(keys: Keys) -> list[int]:
    """Return the query heads of each layer, which may be one number for all."""
    if isinstance(keys.get("attention.head_count"), list):
        return keys.of_layers("attention.head_count")
    return [keys.count("attention.head_count")] * keys.layers


def _kinds(keys: Keys) -> list[str]:
    """Return the kind of each layer; without a list every fourth one sees the whole text.

    It is the first of four in Laguna, the last in K-EXAONE, as in llama.cpp.
    """
    if isinstance(keys.get("attention.sliding_window_pattern"), list):
        return [_KINDS[bit > 0] for bit in keys.of_layers("attention.sliding_window_pattern")]
    full = 0 if keys.name == "laguna" else 3
    return [_KINDS[layer % 4 != full] for layer in range(keys.layers)]
