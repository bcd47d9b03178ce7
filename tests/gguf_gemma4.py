"""Keys and tensors as llama.cpp's converter writes them for Gemma 4, whose layers differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np


def add_gemma4_keys(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """Write what Gemma4Model.set_gguf_parameters and generate_extra_tensors do."""
    ropes, own = config["rope_parameters"], config["per_layer_config"]
    sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
    wide = next(layer["head_dim"] for layer in own.values())
    few = next(iter(own.values())).get("num_key_value_heads")
    if few is not None:
        del writer.kv_data[0]["gemma4.attention.head_count_kv"]
        writer.add_head_count_kv([config["num_key_value_heads"] if s else few for s in sliding])
    writer.add_shared_kv_layers(0)
    writer.add_embedding_length_per_layer_input(0)
    writer.add_sliding_window_pattern(sliding)
    writer.add_sliding_window(config["sliding_window"])
    for kind, add in (("", wide), ("_swa", config["head_dim"])):
        for part in ("key_length", "value_length"):
            getattr(writer, f"add_{part}{kind}")(add)
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config["final_logit_softcapping"] is not None:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["top_k_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    turning = int(wide * ropes["full_attention"]["partial_rotary_factor"] / 2)
    divisors = [1.0] * turning + [1e30] * (wide // 2 - turning)
    writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))


def gemma4_scale(name: str) -> str | None:
    """Return the name of Gemma 4's scales, as Gemma4Model.modify_tensors does."""
    layer = name.split(".")[2]
    scales = {"router.scale": "ffn_gate_inp", "router.per_expert_scale": "ffn_down_exps"}
    return next((f"blk.{layer}.{s}.scale" for end, s in scales.items() if name.endswith(end)), None)
