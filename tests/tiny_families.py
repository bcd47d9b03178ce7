"""Common settings of each family's tiny configurations: sizes, in its own config class."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

YARN = {"rope_type": "yarn", "original_max_position_embeddings": 24, "rope_theta": 1e4}
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
    """A transformers config class and its arguments."""

    family: str
    config_class: str
    settings: dict[str, Any]

    def but(self, **settings: Any) -> Tiny:
        """Return the same with other arguments."""
        return replace(self, settings={**self.settings, **settings})


def mixtral(**settings: Any) -> Tiny:
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "num_local_experts": 5,
    }
    return Tiny("mixtral", "MixtralConfig", {**sizes, **settings})


def olmoe(**settings: Any) -> Tiny:
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


def deepseek(**settings: Any) -> Tiny:
    return Tiny("deepseek_v2", "DeepseekV2Config", {**_DEEPSEEK, **settings})


def qwen3(**settings: Any) -> Tiny:
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


def qwen35(**settings: Any) -> Tiny:
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


def qwen2(**settings: Any) -> Tiny:
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


def deepseek_v3(**settings: Any) -> Tiny:
    return Tiny("deepseek_v3", "DeepseekV3Config", {**_DEEPSEEK, "q_lora_rank": 14, **settings})


def deepseek_v32(**settings: Any) -> Tiny:
    index = {"index_topk": 8, "index_n_heads": 12, "index_head_dim": 14}
    sizes = {**glm4_lite().settings, **index, "n_group": 1, "topk_group": 1}
    more = {"first_k_dense_replace": 1}
    return Tiny("deepseek_v32", "DeepseekV32Config", {**sizes, **more, **settings})


def glm_dsa(**settings: Any) -> Tiny:
    return Tiny("glm_moe_dsa", "GlmMoeDsaConfig", deepseek_v32(**settings).settings)


def glm4(**settings: Any) -> Tiny:
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


def glm4_lite(**settings: Any) -> Tiny:
    sizes = {**_DEEPSEEK, "num_key_value_heads": 3, "q_lora_rank": 14}
    return Tiny("glm4_moe_lite", "Glm4MoeLiteConfig", {**sizes, **settings})


def phimoe(**settings: Any) -> Tiny:
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


def granite(**settings: Any) -> Tiny:
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


def granite_shared(**settings: Any) -> Tiny:
    sizes = {**granite().settings, "shared_intermediate_size": 18}
    return Tiny("granitemoeshared", "GraniteMoeSharedConfig", {**sizes, **settings})


def arctic(**settings: Any) -> Tiny:
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


def gpt_oss(**settings: Any) -> Tiny:
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
        "rope_parameters": {**YARN, "factor": 8.0, "truncate": False},
    }
    return Tiny("gpt_oss", "GptOssConfig", {**sizes, **settings})


def minimax_m2(**settings: Any) -> Tiny:
    sizes = {
        "hidden_size": 40,
        "intermediate_size": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "num_hidden_layers": 2,
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
    }
    return Tiny("minimax_m2", "MiniMaxM2Config", {**sizes, **settings})


def qwen3_next(**settings: Any) -> Tiny:
    sizes = {**qwen35().settings, "intermediate_size": 28}
    return Tiny("qwen3_next", "Qwen3NextConfig", {**sizes, **settings})


def qwen4(**settings: Any) -> Tiny:
    more = {
        "hc_lowrank": 7,
        "ple_layer_ids": [1],
        "ple_embed_dim": 20,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 4,
        "eos_token_id": 5,
        "indexer_n_heads": 5,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
    }
    return Tiny("qwen4_exp", "Qwen4ExpTextConfig", {**qwen35().settings, **more, **settings})


def dots1(**settings: Any) -> Tiny:
    sizes = {**glm4().settings, "n_shared_experts": 2, "norm_topk_prob": True}
    return Tiny("dots1", "Dots1Config", {**sizes, "first_k_dense_replace": 1, **settings})


def solar_open(**settings: Any) -> Tiny:
    sizes = {key: value for key, value in glm4().settings.items() if key != "intermediate_size"}
    return Tiny("solar_open", "SolarOpenConfig", {**sizes, "num_hidden_layers": 2, **settings})


def exaone_moe(**settings: Any) -> Tiny:
    sizes = {key: value for key, value in glm4().settings.items() if key != "n_routed_experts"}
    more = {"num_experts": 8, "sliding_window": 7, "sliding_window_pattern": 3}
    return Tiny("exaone_moe", "ExaoneMoeConfig", {**sizes, **more, **settings})


def ernie(**settings: Any) -> Tiny:
    sizes = {
        "hidden_size": 36,
        "intermediate_size": 28,
        "moe_intermediate_size": 18,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "moe_num_experts": 7,
        "moe_k": 3,
    }
    return Tiny("ernie4_5_moe", "Ernie4_5_MoeConfig", {**sizes, **settings})


def hunyuan(**settings: Any) -> Tiny:
    sizes = {
        "hidden_size": 40,
        "intermediate_size": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "num_hidden_layers": 2,
        "num_experts": 6,
        "moe_topk": 3,
    }
    return Tiny("hunyuan_v1_moe", "HunYuanMoEV1Config", {**sizes, **settings})


def lfm2(**settings: Any) -> Tiny:
    sizes = {
        "hidden_size": 36,
        "intermediate_size": 28,
        "moe_intermediate_size": 18,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "num_dense_layers": 1,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    }
    return Tiny("lfm2_moe", "Lfm2MoeConfig", {**sizes, **settings})


def gemma4(**settings: Any) -> Tiny:
    sizes = {
        "hidden_size": 36,
        "intermediate_size": 50,
        "moe_intermediate_size": 22,
        "num_experts": 7,
        "top_k_experts": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "num_hidden_layers": 3,
        "head_dim": 12,
        "global_head_dim": 16,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 3.0,
        "vocab_size_per_layer_input": 97,
    }
    return Tiny("gemma4", "Gemma4TextConfig", {**sizes, **settings})


def mistral4(**settings: Any) -> Tiny:
    rope = {**YARN, "factor": 4.0, "llama_4_scaling_beta": 0.4}
    sizes = {**deepseek_v3().settings, "num_key_value_heads": 3, "rope_parameters": rope}
    return Tiny("mistral4", "Mistral4Config", {**sizes, **settings})


def kimi_linear(**settings: Any) -> Tiny:
    sizes = {
        **{key: value for key, value in _DEEPSEEK.items() if key != "n_routed_experts"},
        "num_local_experts": 8,
        "num_key_value_heads": 3,
        "num_hidden_layers": 4,
        "linear_num_heads": 4,
        "linear_head_dim": 6,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "bos_token_id": None,
        "eos_token_id": None,
        "max_position_embeddings": 512,
    }
    return Tiny("kimi_linear", "KimiLinearConfig", {**sizes, **settings})


def mimo(**settings: Any) -> Tiny:
    sizes = {
        "hidden_size": 40,
        "intermediate_size": 50,
        "moe_intermediate_size": 18,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 12,
        "v_head_dim": 10,
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    }
    return Tiny("mimo_v2_flash", "MiMoV2FlashConfig", {**sizes, **settings})


def laguna(**settings: Any) -> Tiny:
    sizes = {
        "hidden_size": 36,
        "intermediate_size": 50,
        "moe_intermediate_size": 22,
        "shared_expert_intermediate_size": 26,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_attention_heads_per_layer": [4, 6, 2],
        "num_hidden_layers": 3,
        "head_dim": 12,
        "sliding_window": 7,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {
                **YARN,
                "factor": 4.0,
                "partial_rotary_factor": 0.5,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    }
    return Tiny("laguna", "LagunaConfig", {**sizes, **settings})
