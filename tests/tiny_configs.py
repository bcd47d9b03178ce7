"""A tiny configuration of every family, several of each: odd sizes, and every switch once.

Does not know how a model is made of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_YARN = {"rope_type": "yarn", "original_max_position_embeddings": 24, "rope_theta": 1e4}
_DEEPSEEK = {
    "hidden_size": 36,
    "num_attention_heads": 3,
    "intermediate_size": 50,
    "moe_intermediate_size": 22,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}


@dataclass(frozen=True)
class Tiny:
    """A transformers config class and what it is given."""

    family: str
    config_class: str
    settings: dict[str, Any]


def _mixtral(**settings: Any) -> Tiny:
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "num_local_experts": 5,
    }
    return Tiny("mixtral", "MixtralConfig", {**sizes, **settings})


def _olmoe(**settings: Any) -> Tiny:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
        "num_experts": 7,
        "num_experts_per_tok": 3,
    }
    return Tiny("olmoe", "OlmoeConfig", {**sizes, **settings})


def _deepseek(**settings: Any) -> Tiny:
    return Tiny("deepseek_v2", "DeepseekV2Config", {**_DEEPSEEK, **settings})


def _qwen3(**settings: Any) -> Tiny:
    sizes = {
        "hidden_size": 40,
        "intermediate_size": 28,
        "moe_intermediate_size": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,  # not hidden_size / heads
        "num_hidden_layers": 2,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
    }
    return Tiny("qwen3_moe", "Qwen3MoeConfig", {**sizes, **settings})


def _qwen35(**settings: Any) -> Tiny:
    sizes = {
        "hidden_size": 36,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 10,
        "moe_intermediate_size": 18,
        "shared_expert_intermediate_size": 26,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "max_position_embeddings": 512,
    }
    return Tiny("qwen3_5_moe", "Qwen3_5MoeTextConfig", {**sizes, **settings})


def _qwen2(**settings: Any) -> Tiny:
    sizes = {
        "hidden_size": 36,
        "intermediate_size": 28,
        "moe_intermediate_size": 18,
        "shared_expert_intermediate_size": 26,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "num_hidden_layers": 2,
        "num_experts": 6,
        "num_experts_per_tok": 4,
    }
    return Tiny("qwen2_moe", "Qwen2MoeConfig", {**sizes, **settings})


def _deepseek_v3(**settings: Any) -> Tiny:
    return Tiny("deepseek_v3", "DeepseekV3Config", {**_DEEPSEEK, "q_lora_rank": 14, **settings})


def _glm4(**settings: Any) -> Tiny:
    sizes = {
        "hidden_size": 36,
        "intermediate_size": 50,
        "moe_intermediate_size": 22,
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "head_dim": 12,
    }
    return Tiny("glm4_moe", "Glm4MoeConfig", {**sizes, **settings})


def _glm4_lite(**settings: Any) -> Tiny:
    sizes = {**_DEEPSEEK, "num_key_value_heads": 3, "q_lora_rank": 14}
    return Tiny("glm4_moe_lite", "Glm4MoeLiteConfig", {**sizes, **settings})


def _phimoe(**settings: Any) -> Tiny:
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 28,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "num_local_experts": 6,
        "router_jitter_noise": 0.2,  # so that few experts come close, but more than one
    }
    return Tiny("phimoe", "PhimoeConfig", {**sizes, **settings})


def _granite(**settings: Any) -> Tiny:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 20,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "attention_multiplier": 0.25,
    }
    return Tiny("granitemoe", "GraniteMoeConfig", {**sizes, **settings})


def _arctic(**settings: Any) -> Tiny:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 20,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
    }
    return Tiny("arctic", "ArcticConfig", {**sizes, **settings})


def _gpt_oss(**settings: Any) -> Tiny:
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 20,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "num_hidden_layers": 3,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "sliding_window": 7,
        "rope_parameters": {**_YARN, "factor": 8.0, "truncate": False},
    }
    return Tiny("gpt_oss", "GptOssConfig", {**sizes, **settings})


TINY: dict[str, Tiny] = {
    "arctic": _arctic(),
    "arctic-three": _arctic(
        hidden_size=36,
        num_attention_heads=3,
        num_key_value_heads=3,
        num_hidden_layers=3,
        num_experts_per_tok=3,
        rms_norm_eps=0.03,
        rope_theta=500.0,
    ),
    "mixtral": _mixtral(),
    "mixtral-wide-heads": _mixtral(
        hidden_size=40,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=10,
        num_experts_per_tok=1,
        tie_word_embeddings=True,
    ),
    "mixtral-all-experts": _mixtral(
        num_key_value_heads=1,
        num_experts_per_tok=5,
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    ),
    "mixtral-window": _mixtral(
        sliding_window=7,
        rms_norm_eps=0.03,
        rope_parameters={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 1e4,
        },
    ),
    "olmoe": _olmoe(),
    "olmoe-renormalised": _olmoe(
        hidden_size=60,
        num_attention_heads=6,
        num_key_value_heads=2,
        norm_topk_prob=True,
        num_experts_per_tok=7,
        clip_qkv=0.9,
        rms_norm_eps=0.03,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "olmoe-yarn": _olmoe(
        num_key_value_heads=2,
        num_experts_per_tok=1,
        rope_parameters={**_YARN, "factor": 5.0, "truncate": False},
    ),
    "deepseek-lite": _deepseek(
        q_lora_rank=None,
        first_k_dense_replace=1,
        n_shared_experts=2,
        rope_parameters={
            **_YARN,
            "factor": 40.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
    ),
    "deepseek-groups": _deepseek(
        q_lora_rank=14,
        first_k_dense_replace=2,
        n_shared_experts=1,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        rms_norm_eps=0.03,
        rope_parameters={**_YARN, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    ),
    "deepseek-bare": _deepseek(
        q_lora_rank=14,
        first_k_dense_replace=0,
        n_shared_experts=0,
        num_experts_per_tok=1,
        v_head_dim=22,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "deepseek-v3": _deepseek_v3(
        first_k_dense_replace=1,
        num_key_value_heads=3,
        n_group=4,
        topk_group=2,
        rope_parameters={**_YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek-v3-bare": _deepseek_v3(
        first_k_dense_replace=0,
        num_hidden_layers=2,
        num_key_value_heads=3,
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        n_shared_experts=2,
        num_experts_per_tok=8,
        norm_topk_prob=False,
        routed_scaling_factor=0.7,
        attention_bias=True,
        tie_word_embeddings=True,
        rms_norm_eps=0.03,
    ),
    "deepseek-v3-one-expert": _deepseek_v3(
        first_k_dense_replace=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=1,
        v_head_dim=22,
        rope_parameters={**_YARN, "factor": 4.0},
    ),
    "glm4": _glm4(attention_bias=True),
    "glm4-head-norms": _glm4(
        head_dim=16,
        partial_rotary_factor=0.75,
        use_qk_norm=True,
        first_k_dense_replace=2,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
        tie_word_embeddings=True,
        rms_norm_eps=0.03,
    ),
    "glm4-yarn": _glm4(
        head_dim=8,
        num_key_value_heads=4,
        first_k_dense_replace=0,
        num_hidden_layers=2,
        num_experts_per_tok=7,
        norm_topk_prob=False,
        rope_parameters={**_YARN, "factor": 4.0, "partial_rotary_factor": 1.0},
    ),
    "glm4-lite": _glm4_lite(),
    "glm4-lite-layers": _glm4_lite(
        mlp_layer_types=["sparse", "dense", "sparse"],
        n_group=4,
        topk_group=2,
        num_experts_per_tok=1,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "gpt-oss": _gpt_oss(),
    "gpt-oss-blocks": _gpt_oss(hidden_size=64, intermediate_size=32),  # whole blocks of 32
    "gpt-oss-all-experts": _gpt_oss(
        num_local_experts=4,
        num_experts_per_tok=4,
        num_key_value_heads=6,
        layer_types=["full_attention", "full_attention", "sliding_attention"],
        rms_norm_eps=0.03,
        tie_word_embeddings=True,
    ),
    "gpt-oss-one-expert": _gpt_oss(
        hidden_size=40,
        num_experts_per_tok=1,
        num_key_value_heads=1,
        head_dim=16,
        num_hidden_layers=2,
        sliding_window=2,  # of 1, the cache of transformers 5.23 forgets nothing
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
    "granite": _granite(embedding_multiplier=1.5, logits_scaling=0.7, residual_multiplier=0.6),
    "granite-bare": _granite(
        num_experts_per_tok=1,
        num_key_value_heads=4,
        attention_bias=True,
        tie_word_embeddings=True,
        rms_norm_eps=0.03,
        rope_parameters={**_YARN, "factor": 4.0},
    ),
    "phimoe": _phimoe(),
    "phimoe-biased": _phimoe(
        hidden_size=36,
        num_attention_heads=3,
        num_key_value_heads=1,
        num_local_experts=2,
        router_jitter_noise=0.01,
        attention_bias=True,
        lm_head_bias=True,
        sliding_window=9,
        rms_norm_eps=0.03,
    ),
    "phimoe-longrope": _phimoe(
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "original_max_position_embeddings": 64,
            "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.7],
            "long_factor": [1.1, 1.9, 2.5, 4.0, 7.5, 9.0],
            "short_mscale": 1.2,
            "long_mscale": 1.4,
        },
    ),
    "qwen2": _qwen2(),
    "qwen2-sparse-step": _qwen2(
        num_hidden_layers=5,
        decoder_sparse_step=2,
        num_key_value_heads=1,
        num_experts_per_tok=1,
        norm_topk_prob=True,
        qkv_bias=False,
        tie_word_embeddings=True,
        rms_norm_eps=0.03,
    ),
    "qwen2-window": _qwen2(
        mlp_only_layers=[1],
        num_hidden_layers=4,
        num_experts_per_tok=6,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=3,  # layers 0 and 2 see 6 tokens
        rope_parameters={**_YARN, "factor": 4.0},
    ),
    "qwen3.5": _qwen35(),
    "qwen3.5-full-first": _qwen35(
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        linear_num_key_heads=3,
        linear_num_value_heads=3,
        linear_key_head_dim=9,
        linear_value_head_dim=5,
        linear_conv_kernel_dim=3,
        num_experts_per_tok=1,
        attention_bias=True,
        tie_word_embeddings=True,
        rms_norm_eps=0.03,
    ),
    "qwen3.5-yarn": _qwen35(
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_conv_kernel_dim=2,
        num_experts_per_tok=6,
        rope_parameters={**_YARN, "factor": 4.0, "partial_rotary_factor": 0.5},
    ),
    "qwen3": _qwen3(),
    "qwen3-sparse-step": _qwen3(
        num_hidden_layers=6,
        decoder_sparse_step=2,
        mlp_only_layers=[3, 4],  # so that layers 1 and 5 have experts
        norm_topk_prob=False,
        num_experts_per_tok=1,
        attention_bias=True,
        tie_word_embeddings=True,
        rms_norm_eps=0.03,
    ),
    "qwen3-window": _qwen3(
        num_attention_heads=6,
        num_key_value_heads=6,
        num_experts_per_tok=7,
        use_sliding_window=True,
        sliding_window=5,
        mlp_only_layers=[0],
        num_hidden_layers=3,
        rope_parameters={**_YARN, "factor": 4.0},
    ),
    "deepseek-all-experts": _deepseek(
        q_lora_rank=None,
        num_attention_heads=4,
        num_experts_per_tok=8,
        num_hidden_layers=2,
        n_shared_experts=1,
        rope_parameters={**_YARN, "factor": 4.0, "attention_factor": 0.8},
    ),
}
