"""Tiny configurations of GLM-5.3-Flash, which transformers has inside a model with vision only."""

from __future__ import annotations

from typing import Any

import transformers

from tests.tiny_families import Tiny, deepseek_v32

_VISION = {
    "depth": 1,
    "hidden_size": 8,
    "num_heads": 2,
    "intermediate_size": 8,
    "projection_intermediate_size": 8,
    "patch_size": 2,
    "image_size": 8,
}


def glm5_next(**settings: Any) -> Tiny:
    """Return a configuration of the text part; `with_vision` makes the model's of it."""
    sizes: dict[str, Any] = {
        **{k: v for k, v in deepseek_v32().settings.items() if k != "first_k_dense_replace"},
        "qk_rope_head_dim": 0,
        "num_hidden_layers": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "index_kpool": 4,
        "linear_num_heads": 4,
        "linear_head_dim": 6,
        "max_position_embeddings": 512,
    }
    return Tiny("glm5_next", "Glm5NextTextConfig", {**sizes, **settings})


def with_vision(text: Any) -> Any:
    """Return the config of the whole model."""
    vision = {**_VISION, "out_hidden_size": text.hidden_size}
    tied = text.tie_word_embeddings
    return transformers.Glm5NextConfig(
        text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=tied
    )


GLM5: dict[str, Tiny] = {
    "glm5-next": glm5_next(),
    "glm5-next-shared": glm5_next(
        num_hidden_layers=3,
        layer_types=["indexed_attention"] * 3,
        indexer_types=["full", "shared", "full"],
        mlp_layer_types=["sparse", "sparse", "dense"],
        index_topk=6,
        index_kpool=2,  # 1: equal tokens have equal keys in a first layer without rope
        hc_mult=2,
        hc_sinkhorn_iters=3,
        hc_eps=0.02,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        num_experts_per_tok=1,
        norm_topk_prob=False,
        routed_scaling_factor=0.7,
        attention_bias=True,
        tie_word_embeddings=True,
        rms_norm_eps=0.03,
    ),
    "glm5-next-all-experts": glm5_next(
        num_hidden_layers=2,
        layer_types=["linear_attention", "indexed_attention"],
        mlp_layer_types=["sparse", "sparse"],
        index_topk=30,
        index_kpool=6,
        hc_mult=1,
        linear_num_heads=3,
        linear_head_dim=9,
        linear_conv_kernel_dim=2,
        linear_lower_bound=None,
        num_experts_per_tok=8,
        v_head_dim=22,
    ),
}
