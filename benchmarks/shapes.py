"""The shapes that are raced, with the values of their published config.json files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moeinf.models.base import ModelDataError
from moeinf.models.families import family_of
from moeinf.runtime.checkpoints.inventory import WantedParts

Config = dict[str, Any]

EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_NAMES = {  # the place of a layer's experts, and the names of their matrices
    "": ("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe.experts", "w1", "w3", "w2"),
}
_OF_MODULE = {
    "mtp.0.embedding_norm": "enorm",
    "mtp.0.hidden_norm": "hnorm",
    "mtp.0.joining": "eh_proj",
    "mtp.0.norm": "shared_head.norm",
}
_COMMON: Config = {"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False}
SHAPES: Mapping[str, Config] = {
    "olmoe": {  # allenai/OLMoE-1B-7B-0924
        **_COMMON,
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "vocab_size": 50304,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
    },
    "glm4-narrow": {  # a GLM-4.5 of OLMoE's widths, with its layer for multi-token prediction
        **_COMMON,
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 64,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
        "num_nextn_predict_layers": 1,
        "vocab_size": 50304,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
    },
    "deepseek-v2-lite": {  # deepseek-ai/DeepSeek-V2-Lite
        **_COMMON,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 102400,
        "max_position_embeddings": 163840,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
        "rms_norm_eps": 1e-6,
    },
    "qwen3-30b-a3b": {  # Qwen/Qwen3-30B-A3B
        **_COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
    },
    "qwen3-235b-a22b": {  # Qwen/Qwen3-235B-A22B
        **_COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
    },
    "mixtral-8x7b": {  # mistralai/Mixtral-8x7B-v0.1
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
}


def shape(name: str, layers: int | None = None, experts: int | None = None) -> Config:
    """Return the config of a shape, with fewer layers or experts if given; may raise KeyError."""
    config = dict(SHAPES[name])
    if layers is not None:
        config["num_hidden_layers"] = layers
    if experts is not None:
        config[next(key for key in EXPERTS if key in config)] = experts
    return config


def tensors_of(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of every tensor of a checkpoint with this config, by layer."""
    family = family_of(config)
    parsed, wanted = family.parse(config), WantedParts()
    moe = family.build(parsed, wanted).moe
    yield from wanted.shapes.items()
    for prefix, (rows, width) in wanted.tables.items():
        pieces = config.get("split_ngram_parts", 512)
        for piece in range(pieces):
            mine = rows * (piece + 1) // pieces - rows * piece // pieces
            yield f"{prefix}.shard_{piece}.weight", (mine, width)
    sides = (moe.intermediate, moe.hidden)
    place, gate, up, down = _NAMES.get(config["model_type"], _NAMES[""])
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.{place}"
        try:
            family.expert(f"{prefix}.0.{up}.weight", parsed)
        except ModelDataError:
            continue  # a dense layer
        for expert in range(moe.experts):
            yield f"{prefix}.{expert}.{gate}.weight", sides
            yield f"{prefix}.{expert}.{up}.weight", sides
            yield f"{prefix}.{expert}.{down}.weight", sides[::-1]
    if config.get("num_nextn_predict_layers"):
        yield from _module(config, parsed)


def _module(config: Config, parsed: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors of a layer for multi-token prediction behind the last layer."""
    modules = family_of(config).mtp(parsed)
    assert modules is not None
    own, wanted = modules.parse(config), WantedParts()
    moe, behind = modules.build(own, wanted).moe, f"model.layers.{config['num_hidden_layers']}"
    sides = (moe.intermediate, moe.hidden)
    for name, shape in wanted.shapes.items():
        for ours, theirs in _OF_MODULE.items():
            name = name.replace(ours, f"{behind}.{theirs}")
        yield name.replace("model.layers.0.", f"{behind}."), shape
    for expert in range(moe.experts):
        for matrix in ("gate_proj", "up_proj"):
            yield f"{behind}.mlp.experts.{expert}.{matrix}.weight", sides
        yield f"{behind}.mlp.experts.{expert}.down_proj.weight", sides[::-1]
