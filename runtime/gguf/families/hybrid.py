"""Restore models of Mamba2 or of short convolutions, which have attention in a few layers."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from moeinf.runtime.gguf.families.usual import ATTENTION, body
from moeinf.runtime.gguf.keys import Keys
from moeinf.runtime.gguf.made import Made

_Sides = tuple[int, ...]

GRANITE_HYBRID_NAMES = {
    **ATTENTION,
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_down_shexp": "shared_mlp.output_linear",
    "ssm_in": "mamba.in_proj",
    "ssm_out": "mamba.out_proj",
    "ssm_conv1d": "mamba.conv1d",
}
NEMOTRON_NAMES = {
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ssm_in": "mixer.in_proj",
    "ssm_out": "mixer.out_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
LFM2_NAMES = {
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}


def _flat(_keys: Keys, sides: _Sides) -> tuple[_Sides, Any]:
    return (math.prod(sides),), lambda values: values.reshape(-1)


def _rates(_keys: Keys, sides: _Sides) -> tuple[_Sides, Any]:
    def make(values: Tensor) -> Tensor:
        return (-values).log().reshape(-1)

    return (math.prod(sides),), make


def _kernel(_keys: Keys, sides: _Sides) -> tuple[_Sides, Any]:
    shape = sides[0], 1, sides[-1]
    return shape, lambda values: values.view(shape)


def _mamba(prefix: str) -> dict[str, Made]:
    return {
        f"{prefix}.A_log": Made(("ssm_a",), _rates),
        f"{prefix}.D": Made(("ssm_d",), _flat),
        f"{prefix}.dt_bias": Made(("ssm_dt.bias",), _flat),
        f"{prefix}.conv1d.weight": Made(("ssm_conv1d.weight",), _kernel),
        f"{prefix}.norm.weight": Made(("ssm_norm.weight",), _flat),
    }


GRANITE_MAMBA, NEMOTRON_MAMBA = _mamba("mamba"), _mamba("mixer")
LFM2_MADE = {"conv.conv.weight": Made(("shortconv.conv.weight",), _kernel)}


def granite_hybrid_config(keys: Keys) -> dict[str, Any]:
    """Return config.json of Granite 4.0-H. A layer without key heads is Mamba2."""
    inner, heads = keys.count("ssm.inner_size"), keys.count("ssm.time_step_rank")
    rotated = keys.get("rope.scaling.finetuned")
    return body(keys, "granitemoehybrid") | {
        "attention_bias": keys.side("attn_q.bias", 0) is not None,
        "layer_types": ["attention" if one else "mamba" for one in _attends(keys)],
        "position_embedding_type": "nope" if rotated is False else "rope",
        "intermediate_size": keys.get("feed_forward_length"),
        "shared_intermediate_size": keys.get("expert_shared_feed_forward_length"),
        "num_local_experts": keys.get("expert_count"),
        "attention_multiplier": keys.get("attention.scale"),
        "embedding_multiplier": keys.get("embedding_scale"),
        "residual_multiplier": keys.get("residual_scale"),
        "logits_scaling": keys.get("logit_scale"),
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // keys.count("embedding_length"),
        "mamba_n_groups": keys.get("ssm.group_count"),
        "mamba_d_state": keys.get("ssm.state_size"),
        "mamba_d_conv": keys.get("ssm.conv_kernel"),
        "mamba_conv_bias": keys.side("ssm_conv1d.bias", 0) is not None,
    }


def nemotron_config(keys: Keys) -> dict[str, Any]:
    """Return config.json of Nemotron-3. A layer without key heads and router is Mamba2."""
    heads = keys.count("ssm.time_step_rank")
    sparse = [keys.has_tensor("ffn_gate_inp.weight", block) for block in range(keys.layers)]
    kinds = [
        "moe" if experts else "attention" if attends else "mamba"
        for experts, attends in zip(sparse, _attends(keys), strict=True)
    ]
    eps = keys.get("attention.layer_norm_rms_epsilon")
    return body(keys, "nemotron_h") | {
        "attention_bias": keys.side("attn_q.bias", 0) is not None,
        "layers_block_type": kinds,
        "layer_norm_epsilon": keys.get("attention.layer_norm_epsilon") if eps is None else eps,
        "mamba_num_heads": heads,
        "mamba_head_dim": keys.count("ssm.inner_size") // heads,
        "n_groups": keys.get("ssm.group_count"),
        "ssm_state_size": keys.get("ssm.state_size"),
        "conv_kernel": keys.get("ssm.conv_kernel"),
        "use_conv_bias": keys.side("ssm_conv1d.bias", 0) is not None,
        "n_routed_experts": keys.get("expert_count"),
        "moe_intermediate_size": keys.get("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": keys.get("expert_shared_feed_forward_length"),
        "moe_latent_size": keys.get("moe_latent_size") or None,
        "n_group": keys.get("expert_group_count") or 1,
        "topk_group": keys.get("expert_group_used_count") or 1,
        "norm_topk_prob": keys.get("expert_weights_norm") or False,
        "routed_scaling_factor": keys.get("expert_weights_scale") or 1.0,
    }


def lfm2_config(keys: Keys) -> dict[str, Any]:
    """Return config.json of LFM2. A layer without key heads is a short convolution."""
    return body(keys, "lfm2_moe") | {
        "norm_eps": keys.get("attention.layer_norm_rms_epsilon"),
        "layer_types": ["full_attention" if one else "conv" for one in _attends(keys)],
        "conv_L_cache": keys.get("shortconv.l_cache"),
        "intermediate_size": keys.get("feed_forward_length"),
        "moe_intermediate_size": keys.get("expert_feed_forward_length"),
        "num_dense_layers": keys.get("leading_dense_block_count") or 0,
        "num_experts": keys.get("expert_count"),
        "use_expert_bias": keys.side("exp_probs_b.bias", 0) is not None,
        "norm_topk_prob": True,  # llama.cpp knows no other
        "routed_scaling_factor": keys.get("expert_weights_scale") or 1.0,
    }


def _attends(keys: Keys) -> list[bool]:
    """Return True for each layer with attention: it has key heads."""
    return [count > 0 for count in keys.of_layers("attention.head_count_kv")]
