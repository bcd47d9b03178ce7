"""Tiny configurations of the families of 2026, of which few are tested by default."""

from __future__ import annotations

from tests.tiny_families import (
    YARN,
    Tiny,
    dots1,
    ernie,
    hunyuan,
    lfm2,
    minimax_m2,
    qwen3_next,
)

RECENT: dict[str, Tiny] = {
    "minimax-m2": minimax_m2(rope_parameters={"rope_theta": 500.0, "partial_rotary_factor": 0.5}),
    "minimax-m2-yarn": minimax_m2(
        num_key_value_heads=4,
        num_experts_per_tok=7,
        rms_norm_eps=0.03,
        tie_word_embeddings=True,
        rope_parameters={**YARN, "factor": 4.0},
    ),
    "minimax-m2-one-expert": minimax_m2(
        num_attention_heads=3, num_key_value_heads=1, num_experts_per_tok=1, head_dim=16
    ),
    "qwen3-next": qwen3_next(),
    "qwen3-next-dense-first": qwen3_next(
        mlp_only_layers=[0],
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_hidden_layers=3,
        linear_num_key_heads=3,
        linear_num_value_heads=3,
        linear_key_head_dim=9,
        linear_value_head_dim=5,
        linear_conv_kernel_dim=3,
        num_experts_per_tok=1,
        norm_topk_prob=False,
        attention_bias=True,
        tie_word_embeddings=True,
        rms_norm_eps=0.03,
    ),
    "qwen3-next-all-experts": qwen3_next(
        num_hidden_layers=2,
        decoder_sparse_step=2,
        layer_types=["linear_attention", "full_attention"],
        num_experts_per_tok=6,
        rope_parameters={**YARN, "factor": 4.0, "partial_rotary_factor": 0.5},
    ),
    "dots1": dots1(sliding_window=None),
    "dots1-window": dots1(
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        sliding_window=6,
        max_window_layers=1,
        norm_topk_prob=False,
        routed_scaling_factor=2.5,
        attention_bias=True,
        tie_word_embeddings=True,
        rms_norm_eps=0.03,
    ),
    "dots1-all-experts": dots1(
        first_k_dense_replace=2,
        n_shared_experts=1,
        num_experts_per_tok=7,
        rope_parameters={**YARN, "factor": 4.0},
    ),
    "ernie4.5": ernie(tie_word_embeddings=False),
    "ernie4.5-intervals": ernie(
        num_hidden_layers=5,
        moe_layer_interval=2,
        moe_layer_start_index=0,
        moe_layer_end_index=3,
        moe_num_shared_experts=0,
        moe_k=1,
        head_dim=10,
        rms_norm_eps=0.03,
        rope_parameters={**YARN, "factor": 4.0},
    ),
    "ernie4.5-all-experts": ernie(moe_k=7, num_key_value_heads=6, num_hidden_layers=2),
    "hunyuan": hunyuan(
        rope_parameters={"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e4},
        tie_word_embeddings=True,
    ),
    "hunyuan-one-expert": hunyuan(
        moe_topk=1, num_key_value_heads=1, attention_bias=True, rms_norm_eps=0.03
    ),
    "hunyuan-all-experts": hunyuan(
        moe_topk=6,
        num_key_value_heads=4,
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    ),
    "lfm2": lfm2(),
    "lfm2-biased": lfm2(
        conv_bias=True,
        conv_L_cache=4,
        num_hidden_layers=3,
        num_dense_layers=0,
        layer_types=["full_attention", "conv", "full_attention"],
        use_expert_bias=False,
        num_experts_per_tok=1,
        norm_topk_prob=False,
        routed_scaling_factor=0.7,
        tie_word_embeddings=False,
        norm_eps=0.03,
    ),
    "lfm2-all-experts": lfm2(
        num_hidden_layers=2,
        layer_types=["conv", "full_attention"],
        conv_L_cache=2,
        num_experts_per_tok=7,
        num_key_value_heads=6,
        rope_parameters={**YARN, "factor": 4.0},
    ),
}
# One configuration of each of these families is tested by default, and all with -m full.
BRIEF: tuple[str, ...] = (
    "minimax-m2",
    "qwen3-next",
    "dots1",
    "ernie4.5",
    "lfm2",
    "hunyuan",
)
