"""Tiny configurations of GLM-5.3-Flash and GLM-4.5V: transformers has them with vision only."""

from __future__ import annotations

from typing import Any

import transformers

from tests.tiny_families import YARN, Tiny, deepseek_v32, glm4

_VISION = {
    "depth": 1,
    "hidden_size": 8,
    "num_heads": 2,
    "intermediate_size": 8,
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


def glm4v(**settings: Any) -> Tiny:
    """Return a configuration of the text part: see `glm5_next`. Three pairs of a head rotate."""
    rope = {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]}
    sizes = {**glm4().settings, "rope_parameters": rope}
    return Tiny("glm4v_moe", "Glm4vMoeTextConfig", {**sizes, **settings})


def with_vision(text: Any) -> Any:
    """Return the model, without weights, around a text part."""
    vision = {**_VISION, "out_hidden_size": text.hidden_size}
    name = "Glm4vMoe"
    if isinstance(text, transformers.Glm5NextTextConfig):
        name, vision = "Glm5Next", {**vision, "projection_intermediate_size": 8}
    config = getattr(transformers, f"{name}Config")(
        text_config=text.to_dict(),
        vision_config=vision,
        tie_word_embeddings=text.tie_word_embeddings,
    )
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    return kind._from_config(config, experts_implementation="eager", attn_implementation="eager")


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
GLM4V: dict[str, Tiny] = {
    "glm4v": glm4v(),  # with biases, which are the default
    "glm4v-dense-first": glm4v(
        attention_bias=False,
        first_k_dense_replace=2,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        n_shared_experts=2,
        num_experts_per_tok=1,
        num_key_value_heads=1,
        norm_topk_prob=False,
        routed_scaling_factor=2.5,
        tie_word_embeddings=True,
        rms_norm_eps=0.03,
    ),
    "glm4v-all-experts": glm4v(
        first_k_dense_replace=0,
        num_hidden_layers=2,
        num_experts_per_tok=7,
        num_key_value_heads=4,
        rope_parameters={
            **YARN,
            "factor": 4.0,
            "partial_rotary_factor": 1.0,
            "mrope_section": [1, 2, 3],
        },
    ),
}
