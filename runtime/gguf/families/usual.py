"""The names of tensors and the parts of a config that most architectures share."""

from __future__ import annotations

from typing import Any

from moeinf.runtime.gguf.keys import Keys
from moeinf.runtime.gguf.made import Modules

# GGUF's name inside a block -> the name inside a layer. A `.weight` or `.bias` stays.
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
}
MLP = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SHARED = {  # one expert that runs for all tokens
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
SIGMOID = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
AFTER = {"post_attention_norm": "post_attention_layernorm"}
LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",  # in files of before April 2025
}
BEHIND = Modules(  # as layers after the last one
    "model.layers.{block}.",
    "model.layers.{block}.",
    {
        "nextn.eh_proj": "eh_proj",
        "nextn.enorm": "enorm",
        "nextn.hnorm": "hnorm",
        "nextn.shared_head_norm": "shared_head.norm",
    },
)


def body(keys: Keys, model_type: str) -> dict[str, Any]:
    """Return the values that all decoders have."""
    return {
        "model_type": model_type,
        "vocab_size": keys.vocab,
        "hidden_size": keys.get("embedding_length"),
        "num_hidden_layers": keys.layers,
        "num_attention_heads": keys.get("attention.head_count"),
        "num_key_value_heads": keys.kv_heads,
        "head_dim": keys.get("attention.key_length"),
        "max_position_embeddings": keys.get("context_length"),
        "rms_norm_eps": keys.get("attention.layer_norm_rms_epsilon"),
        "rope_parameters": keys.rope(),
        "attention_bias": keys.has_tensor("attn_q.bias"),
        "num_experts_per_tok": keys.get("expert_used_count"),
    }


def qwen_experts(keys: Keys) -> dict[str, Any]:
    """Return the experts' part of Qwen's configs."""
    return {
        "num_experts": keys.get("expert_count"),
        "intermediate_size": keys.get("feed_forward_length"),
        "moe_intermediate_size": keys.side("ffn_down_exps.weight", -1),
        "shared_expert_intermediate_size": keys.side("ffn_down_shexp.weight", -1),
    }


def sigmoid_experts(keys: Keys) -> dict[str, Any]:
    """Return the experts' part of DeepSeek's and GLM's configs."""
    return {
        "n_routed_experts": keys.get("expert_count"),
        "n_shared_experts": keys.get("expert_shared_count") or 0,
        "intermediate_size": keys.get("feed_forward_length"),
        "moe_intermediate_size": keys.get("expert_feed_forward_length"),
        "first_k_dense_replace": keys.get("leading_dense_block_count") or 0,
        "n_group": keys.get("expert_group_count") or 1,
        "topk_group": keys.get("expert_group_used_count") or 1,
        "norm_topk_prob": keys.get("expert_weights_norm") or False,
        "routed_scaling_factor": keys.get("expert_weights_scale") or 1.0,
        "num_nextn_predict_layers": keys.modules,
    }


def latent_sizes(keys: Keys, rotates: bool = True) -> dict[str, Any]:
    """Return the sizes of latent attention, of which a part rotates."""
    turned = keys.count("rope.dimension_count") if rotates else 0
    return {
        "num_key_value_heads": keys.get("attention.head_count"),
        "head_dim": None,
        "q_lora_rank": keys.get("attention.q_lora_rank") or None,
        "kv_lora_rank": keys.get("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": keys.count(keys.first("attention.key_length_mla", "key_length"))
        - turned,
        "v_head_dim": keys.get(keys.first("attention.value_length_mla", "value_length")),
        "attention_bias": keys.has_tensor("attn_kv_a_mqa.bias"),
    }
