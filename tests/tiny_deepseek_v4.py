"""Tiny configurations of DeepSeek-V4."""

from __future__ import annotations

from typing import Any

from tests.tiny_families import YARN, Tiny

_SLIDING, _SPARSE, _HEAVY = (
    "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
)  # fmt: skip


def deepseek_v4(sparse: int = 4, heavy: int = 8, **settings: Any) -> Tiny:
    """Return a configuration. sparse, heavy: tokens per entry."""
    sizes = {
        "hidden_size": 28,
        "moe_intermediate_size": 22,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 20,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 14,
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "sliding_window": 6,
        "o_groups": 2,
        "o_lora_rank": 9,
        "index_n_heads": 16,  # so that no scores are equal: all heads at 0
        "index_head_dim": 12,
        "index_topk": 5,
        "layer_types": [_SLIDING, _SPARSE, _HEAVY, _SPARSE],
        "max_position_embeddings": 512,
        "compress_rates": {_SPARSE: sparse, _HEAVY: heavy},
        "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
    }
    return Tiny("deepseek_v4", "DeepseekV4Config", {**sizes, **settings})


DEEPSEEK_V4: dict[str, Tiny] = {
    "deepseek-v4": deepseek_v4(rope_parameters={**YARN, "factor": 4.0}),
    "deepseek-v4-heavy": deepseek_v4(
        heavy=5,
        layer_types=[_HEAVY, _HEAVY],
        mlp_layer_types=["moe", "hash_moe"],
        num_hidden_layers=2,
        num_attention_heads=3,
        o_groups=1,
        qk_rope_head_dim=20,  # all of it rotates
        sliding_window=2,  # the cache of transformers keeps all tokens for 1
        num_experts_per_tok=1,
        hc_mult=3,
        hc_sinkhorn_iters=2,
        hc_eps=0.01,
        routed_scaling_factor=0.7,
        tie_word_embeddings=True,
        rms_norm_eps=0.03,
    ),
    "deepseek-v4-all-experts": deepseek_v4(
        sparse=3,
        layer_types=[_SPARSE, _SLIDING],
        mlp_layer_types=["moe", "moe"],
        num_hidden_layers=2,
        index_topk=1,
        index_head_dim=8,
        o_groups=4,
        sliding_window=128,
        num_experts_per_tok=7,
        hc_mult=1,
        rms_norm_eps=0.03,
    ),
}
