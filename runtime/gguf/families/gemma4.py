"""The keys and names of Gemma 4 with experts, whose layers differ in their heads."""

from __future__ import annotations

from typing import Any

from moeinf.runtime.gguf.keys import Keys

_STILL = 1e29  # a divisor of frequencies that leaves a pair as it is; the converter writes 1e30

# GGUF's name inside a block -> the name inside a layer. A `.weight` stays.
GEMMA4_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "layer_output_scale.weight": "layer_scalar",
}


def gemma4_config(keys: Keys) -> dict[str, Any]:
    """Return config.json of the text part."""
    sliding, heads = _each(keys, "attention.sliding_window_pattern"), _kv_heads(keys)
    whole = [layer for layer, windowed in enumerate(sliding) if not windowed]
    narrow = keys.get("attention.key_length_swa")
    own = {
        str(layer): {
            "head_dim": narrow if windowed else keys.count("attention.key_length"),
            "num_key_value_heads": heads[layer],
        }
        for layer, windowed in enumerate(sliding)
    }
    return {
        "model_type": "gemma4_text",
        "vocab_size": keys.vocab,
        "hidden_size": keys.get("embedding_length"),
        "num_hidden_layers": keys.layers,
        "num_attention_heads": keys.get("attention.head_count"),
        "num_key_value_heads": heads[0],
        "head_dim": narrow,
        "per_layer_config": own,
        "layer_types": [("full", "sliding")[windowed] + "_attention" for windowed in sliding],
        "sliding_window": keys.count("attention.sliding_window"),
        "attention_k_eq_v": any(not keys.has_tensor("attn_v.weight", layer) for layer in whole),
        "max_position_embeddings": keys.get("context_length"),
        "rms_norm_eps": keys.get("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _ropes(keys),
        "final_logit_softcapping": keys.get("final_logit_softcapping") or None,
        "intermediate_size": keys.get("feed_forward_length"),
        "moe_intermediate_size": keys.get("expert_feed_forward_length"),
        "num_experts": keys.get("expert_count"),
        "top_k_experts": keys.get("expert_used_count"),
        "enable_moe_block": True,
        "hidden_size_per_layer_input": keys.get("embedding_length_per_layer_input") or 0,
        "num_kv_shared_layers": keys.get("attention.shared_kv_layers") or 0,
    }


def _each(keys: Keys, key: str) -> list[Any]:
    """Return a list with a value for each layer. Raises BadCheckpoint."""
    found = keys.get(key)
    if not isinstance(found, list) or len(found) != keys.layers:
        raise keys.bad(f"has no {keys.name}.{key} with one value for each layer")
    if not all(isinstance(one, bool | int) for one in found):
        raise keys.bad(f"has a {keys.name}.{key} with a value that is no number")
    return found


def _kv_heads(keys: Keys) -> list[int]:
    """Return the key-value heads of each layer, which may be one number for all."""
    if isinstance(keys.get("attention.head_count_kv"), list):
        return _each(keys, "attention.head_count_kv")
    return [keys.kv_heads] * keys.layers


def _ropes(keys: Keys) -> dict[str, Any]:
    """Return `rope_parameters`: divisors of frequencies tell which pairs of a wide head turn."""
    theta = keys.get("rope.freq_base")
    sliding = keys.get("rope.freq_base_swa")
    freqs = keys.file.factors.get("rope_freqs.weight")
    turning = 0 if freqs is None else freqs.count(1.0)
    still = () if freqs is None else freqs[turning:]
    if not turning or any(divisor < _STILL for divisor in still):
        raise keys.bad("has no rope_freqs of some ones and then large divisors")
    if keys.get("rope.scaling.type") not in (None, "none"):
        raise keys.bad("has a rope scaling, which is not supported in gemma4")
    assert freqs is not None
    return {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": turning / len(freqs),
            "rope_theta": theta,
        },
        "sliding_attention": {"rope_theta": theta if sliding is None else sliding},
    }
