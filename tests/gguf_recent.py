"""Keys and tensors as llama.cpp's converter writes them for the families of 2026."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import gguf
from torch import Tensor

RECENT = {  # model_type -> the architecture whose names the package gives
    "dots1": gguf.MODEL_ARCH.DOTS1,
    "ernie4_5_moe": gguf.MODEL_ARCH.ERNIE4_5_MOE,
    "exaone_moe": gguf.MODEL_ARCH.EXAONE_MOE,
    "hunyuan_v1_moe": gguf.MODEL_ARCH.HUNYUAN_MOE,
    "laguna": gguf.MODEL_ARCH.DOTS1,  # the package lacks it
    "minimax_m2": gguf.MODEL_ARCH.MINIMAXM2,
    "solar_open": gguf.MODEL_ARCH.GLM4_MOE,
}
NAMES = {"laguna": "laguna"}  # of architectures that the package lacks
SIGMOID = (
    "dots1",
    "exaone_moe",
    "kimi_linear",
    "laguna",
    "mimo_v2_flash",
    "minimax_m2",
    "solar_open",
)
SPELLINGS = {  # keys of a config -> those of other families
    "model_max_length": "max_position_embeddings",
    "moe_k": "num_experts_per_tok",
    "moe_layer_start_index": "first_k_dense_replace",
    "moe_num_experts": "num_experts",
    "moe_num_shared_experts": "n_shared_experts",
    "moe_routed_scaling_factor": "routed_scaling_factor",
    "moe_topk": "num_experts_per_tok",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}


def named(name: str) -> str | None:
    """Return the name of a tensor that the package has no name for."""
    block = f"blk.{name.split('.')[2]}" if name.startswith("model.layers.") else ""
    ends = {
        "self_attn.g_proj.weight": "attn_gate.weight",
        "mlp.experts.e_score_correction.bias": "exp_probs_b.bias",
    }
    return next((f"{block}.{to}" for end, to in ends.items() if name.endswith(end)), None)


def changed(name: str, values: Tensor, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor as the converter of its architecture changes it."""
    yield name, values


def add_recent_keys(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """Write what set_gguf_parameters of each architecture adds."""
    family, rope = config["model_type"], config.get("rope_parameters") or {}
    if family in ("dots1", "exaone_moe", "solar_open"):
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if family in ("minimax_m2", "solar_open"):
        share = rope.get("partial_rotary_factor", 1.0)
        writer.add_rope_dimension_count(int(config["head_dim"] * share))
    if family == "ernie4_5_moe":
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
        shared = config["moe_num_shared_experts"] * config["moe_intermediate_size"]
        writer.add_expert_shared_feed_forward_length(shared)
    if family == "hunyuan_v1_moe":
        width = config["head_dim"]
        theta = rope["rope_theta"] * rope.get("alpha", 1) ** (width / (width - 2))
        writer.add_rope_freq_base(theta)
        for add in ("", "_shared"):
            getattr(writer, f"add_expert{add}_feed_forward_length")(config["intermediate_size"])
    if family == "minimax_m2":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if family in ("exaone_moe", "laguna"):
        writer.add_sliding_window(config["sliding_window"])
        kinds = config["layer_types"]
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    if family == "exaone_moe":
        shared = config["num_shared_experts"] * config["moe_intermediate_size"]
        writer.add_expert_shared_feed_forward_length(shared)
    if family == "laguna":
        _laguna(writer, config)


def _laguna(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_head_count(config["num_attention_heads_per_layer"])
    writer.add_expert_weights_norm(True)
    width, ropes = config["head_dim"], config["rope_parameters"]
    for kind, end in (("full_attention", ""), ("sliding_attention", "_swa")):
        turned = int(width * ropes[kind].get("partial_rotary_factor", 1))
        getattr(writer, f"add_rope_dimension_count{end}")(turned)
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
