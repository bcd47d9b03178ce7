"""Tiny configurations of the families with Mamba2 layers."""

from __future__ import annotations

from typing import Any

from tests.tiny_families import Tiny, granite_shared


def granite_hybrid(**settings: Any) -> Tiny:
    sizes = {
        **granite_shared().settings,
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "mamba_n_heads": 4,
        "mamba_d_state": 10,
        "max_position_embeddings": 512,
    }
    return Tiny("granitemoehybrid", "GraniteMoeHybridConfig", {**sizes, **settings})


def nemotron(**settings: Any) -> Tiny:
    sizes = {
        "hidden_size": 36,
        "layers_block_type": ["mamba", "moe", "mamba", "attention", "moe"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "mamba_num_heads": 6,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 10,
        "moe_intermediate_size": 18,
        "moe_shared_expert_intermediate_size": 26,
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "max_position_embeddings": 512,
        "time_step_min": 1e-9,  # transformers lifts dt to it, in prompts only
    }
    return Tiny("nemotron_h", "NemotronHConfig", {**sizes, **settings})


MAMBA: dict[str, Tiny] = {
    "granite-hybrid": granite_hybrid(
        embedding_multiplier=1.5, residual_multiplier=0.6, logits_scaling=0.7
    ),
    "granite-hybrid-rope": granite_hybrid(
        num_hidden_layers=3,
        layer_types=["attention", "mamba", "attention"],
        position_embedding_type="rope",
        mamba_n_heads=6,
        mamba_n_groups=3,
        mamba_expand=3,
        mamba_d_state=7,
        mamba_d_conv=3,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        num_experts_per_tok=1,
        attention_bias=True,
        tie_word_embeddings=True,
        rms_norm_eps=0.03,
    ),
    "granite-hybrid-all-experts": granite_hybrid(
        hidden_size=40,
        num_hidden_layers=2,
        layer_types=["mamba", "attention"],
        mamba_n_groups=2,
        mamba_d_conv=2,
        num_experts_per_tok=6,
        num_key_value_heads=4,
    ),
    "nemotron": nemotron(routed_scaling_factor=2.5),
    "nemotron-alone": nemotron(
        layers_block_type=["moe", "mlp", "attention", "attention", "moe", "moe", "mamba"],
        intermediate_size=22,
        mamba_num_heads=3,
        n_groups=1,
        conv_kernel=2,
        use_conv_bias=False,
        use_bias=True,
        mlp_bias=True,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=1,
        norm_topk_prob=False,
        layer_norm_epsilon=0.03,
    ),
    "nemotron-all-experts": nemotron(
        layers_block_type=["attention", "mlp", "mamba", "moe"],
        n_groups=6,
        head_dim=16,
        num_key_value_heads=4,
        num_experts_per_tok=7,
    ),
    "nemotron-latent": nemotron(moe_latent_size=20, mlp_bias=True, num_experts_per_tok=5),
}
