"""Kimi-K2's numbers, as published, in DeepSeek-V3's file."""

from __future__ import annotations

from typing import Any

import pytest

from moeinf.models.base import ExpertPart, MoeShape
from moeinf.models.families import family_of
from tests.tiny_packed import compressed, scheme

YARN = {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0}
YARN |= {"original_max_position_embeddings": 4096}
K2: dict[str, Any] = {
    "model_type": "kimi_k2",
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
    "rope_scaling": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 163840,
}
K25: dict[str, Any] = {
    "model_type": "kimi_k25",
    "text_config": {
        **K2,
        "model_type": "deepseek_v3",
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0},
    },
    "tie_word_embeddings": False,
    "vision_config": {"vt_num_hidden_layers": 27},
}
INT4 = compressed({**scheme(), "observer": "minmax", "dynamic": False, "block_structure": None})
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["vision_tower*"]}


@pytest.mark.parametrize(
    "values",
    [
        K2,
        {**K2, "quantization_config": INT4},
        {**K25, "quantization_config": NVFP4},
        {**K25, "text_config": {**K25["text_config"], "quantization_config": INT4}},
    ],
)
def test_the_sizes(values: dict[str, Any]) -> None:
    config = family_of(values).parse(values)
    assert config.moe == MoeShape(layers=60, experts=384, top_k=8, hidden=7168, intermediate=2048)
    assert (config.ffn.groups, config.ffn.scale) == (None, 2.827)
    assert len(config.ffn.extra_layers) == 0
    assert config.attention.heads == 64
    factor = 32 if values["model_type"] == "kimi_k2" else 64
    assert (config.body.rope.kind, config.body.rope.factor) == ("yarn", factor)
    assert config.body.max_context == 4096 * factor


def test_names() -> None:
    name = "model.layers.60.mlp.experts.383.up_proj.weight"
    for values, prefix in ((K2, ""), (K25, "language_model.")):
        family, config = family_of(values), family_of(values).parse(values)
        assert family.expert(prefix + name, config) == ExpertPart(59, 383, "up")
        assert family.rename(f"{prefix}lm_head.weight") == "lm_head.weight"
        assert family.expert(f"{prefix}lm_head.weight", config) is None
    for name in ("vision_tower.encoder.x.weight", "mm_projector.proj.0.bias"):
        assert family.ignores(name, config)
        assert family.expert(name, config) is None
