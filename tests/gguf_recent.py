"""Keys and tensors as llama.cpp's converter writes them for the families of 2026."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import gguf
import torch
from torch import Tensor

RECENT = {  # model_type -> the architecture whose names the package gives
    "deepseek_v32": gguf.MODEL_ARCH.GLM_DSA,  # the package lacks it
    "dots1": gguf.MODEL_ARCH.DOTS1,
    "ernie4_5_moe": gguf.MODEL_ARCH.ERNIE4_5_MOE,
    "exaone_moe": gguf.MODEL_ARCH.EXAONE_MOE,
    "glm_moe_dsa": gguf.MODEL_ARCH.GLM_DSA,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "hunyuan_v1_moe": gguf.MODEL_ARCH.HUNYUAN_MOE,
    "laguna": gguf.MODEL_ARCH.DOTS1,  # the package lacks it
    "lfm2_moe": gguf.MODEL_ARCH.LFM2MOE,
    "minimax_m2": gguf.MODEL_ARCH.MINIMAXM2,
    "mistral4": gguf.MODEL_ARCH.MISTRAL4,
    "nemotron_h": gguf.MODEL_ARCH.NEMOTRON_H_MOE,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "solar_open": gguf.MODEL_ARCH.GLM4_MOE,
}
NAMES = {
    "laguna": "laguna",
    "deepseek_v32": "deepseek32",
}  # of architectures that the package lacks
CLASSES = {"glm4v_moe_text": "glm4_moe", "kimi_k2": "deepseek_v3"}  # of the converter: one for both
SIGMOID = (
    "deepseek_v32",
    "dots1",
    "exaone_moe",
    "glm_moe_dsa",
    "kimi_linear",
    "laguna",
    "lfm2_moe",
    "mimo_v2_flash",
    "minimax_m2",
    "solar_open",
)
SPELLINGS = {  # keys of a config -> those of other families
    "layer_norm_epsilon": "rms_norm_eps",
    "model_max_length": "max_position_embeddings",
    "moe_k": "num_experts_per_tok",
    "moe_layer_start_index": "first_k_dense_replace",
    "moe_num_experts": "num_experts",
    "moe_num_shared_experts": "n_shared_experts",
    "moe_routed_scaling_factor": "routed_scaling_factor",
    "moe_topk": "num_experts_per_tok",
    "norm_eps": "rms_norm_eps",
    "num_dense_layers": "first_k_dense_replace",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}


def text_part(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without those of vision, named as in a model of text alone."""
    return {
        name.replace("language_model.", "", 1): values
        for name, values in stored.items()
        if not name.startswith("model.visual.")
    }


def named(name: str) -> str | None:
    """Return the name of a tensor that the package has no name for."""
    block = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    ends = {
        **{f"mixer.experts.{r}_proj.weight": f"ffn_{r}_exps.weight" for r in ("up", "down")},
        "self_attn.g_proj.weight": "attn_gate.weight",
        "mlp.experts.e_score_correction.bias": "exp_probs_b.bias",
    }
    return next((f"{block}.{to}" for end, to in ends.items() if name.endswith(end)), None)


def changed(name: str, values: Tensor, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor as the converter of its architecture changes it."""
    family = config["model_type"]
    if family == "nemotron_h":
        name = name.replace("model.layers.", "backbone.layers.")
    if family == "granitemoehybrid" and ".shared_mlp.input_linear." in name:
        for role, half in zip(("gate", "up"), values.chunk(2), strict=True):
            yield f"model.layers.{name.split('.')[2]}.mlp.shared_expert.{role}_proj.weight", half
        return
    if family == "qwen3_next":
        yield from _qwen3_next(name, values, config)
        return
    if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
        name = f"{name}.weight"
    elif name.endswith((".conv1d.weight", ".conv.conv.weight")):
        values = values.squeeze(1)
    elif name.endswith((".A_log", ".D")):
        values = (-values.exp() if name.endswith(".A_log") else values)[:, None]
    elif name.endswith(".expert_bias"):
        name = f"{name}.bias"
    elif name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        values = values.view(config.get("n_groups", config.get("mamba_n_groups")), -1)
    elif name.endswith("dt_bias"):
        name = name.replace(".dt_bias", ".dt.bias" if family == "nemotron_h" else ".dt_proj.bias")
    yield name, values


def _qwen3_next(
    name: str, values: Tensor, config: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Change a tensor as Qwen3NextModel does."""
    if ".in_proj_qkvz." in name:
        groups, width = config["linear_num_key_heads"], config["linear_key_head_dim"]
        share = config["linear_num_value_heads"] // groups * config["linear_value_head_dim"]
        whole = values.view(groups, -1, values.shape[1])
        q, k, v, z = (
            part.reshape(-1, values.shape[1])
            for part in torch.split(whole, [width, width, share, share], 1)
        )
        yield name.replace("in_proj_qkvz", "in_proj_qkv"), torch.cat((q, k, v))
        yield name.replace("in_proj_qkvz", "in_proj_z"), z
        return
    if name.endswith(".A_log"):
        values = -values.exp()
    elif name.endswith(".dt_bias"):
        name = name.replace(".dt_bias", ".dt_proj.bias")
    elif ".conv1d." in name:
        values = values.squeeze()
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        values = values + 1
    yield name, values


def add_recent_keys(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """Write what set_gguf_parameters of each architecture adds."""
    family, rope = config["model_type"], config.get("rope_parameters") or {}
    if sections := rope.get("mrope_section"):
        writer.add_rope_dimension_sections([*sections, 0])
    if family in ("dots1", "exaone_moe", "solar_open"):
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if family in ("minimax_m2", "solar_open"):
        share = rope.get("partial_rotary_factor", 1.0)
        writer.add_rope_dimension_count(int(config["head_dim"] * share))
    if family == "mimo_v2_flash":
        sliding = rope["sliding_attention"]
        writer.add_rope_dimension_count(int(config["head_dim"] * sliding["partial_rotary_factor"]))
        writer.add_rope_freq_base_swa(sliding["rope_theta"])
        writer.add_sliding_window(config["sliding_window"])
        kinds = config["layer_types"]
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
        writer.add_float32("mimo2.attention.value_scale", config["attention_value_scale"])
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
    if family == "qwen3_next":
        share = rope.get("partial_rotary_factor", 0.25)
        writer.add_rope_dimension_count(int(config["head_dim"] * share))
        inner = config["linear_value_head_dim"] * config["linear_num_value_heads"]
        writer.add_ssm_inner_size(inner)
        kinds = config["layer_types"]
        recurrent = [kind == "linear_attention" for kind in kinds]
        writer.add_array("qwen3next.attention.recurrent_layers", recurrent)
    if family == "lfm2_moe":
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if family == "granitemoehybrid":
        inner = config["mamba_expand"] * config["hidden_size"]
        _mamba(writer, config["mamba_n_heads"], inner, config, "mamba_n_groups", "mamba_d_state")
        writer.add_ssm_conv_kernel(config["mamba_d_conv"])
        writer.add_rope_scaling_finetuned(config.get("position_embedding_type") == "rope")
    if family == "nemotron_h":
        _nemotron(writer, config)
    if family in ("deepseek_v32", "glm_moe_dsa"):
        writer.add_indexer_head_count(config["index_n_heads"])
        writer.add_indexer_key_length(config["index_head_dim"])
        writer.add_indexer_top_k(config["index_topk"])
    if family == "glm_moe_dsa":
        types = [kind == "full" for kind in config["indexer_types"]]
        writer.add_array("glm-dsa.attention.indexer.types", types)
    if family == "mistral4":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)


def _mamba(
    writer: gguf.GGUFWriter, heads: int, inner: int, config: Mapping[str, Any], *names: str
) -> None:
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_group_count(config[names[0]])
    writer.add_ssm_state_size(config[names[1]])


def _nemotron(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    heads, kinds = config["mamba_num_heads"], config["layers_block_type"]
    _mamba(writer, heads, heads * config["mamba_head_dim"], config, "n_groups", "ssm_state_size")
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    width = config["moe_intermediate_size"]
    writer.add_feed_forward_length([width if kind == "moe" else 0 for kind in kinds])
    shared = config["moe_shared_expert_intermediate_size"]
    writer.add_expert_shared_feed_forward_length(shared)
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    if config.get("moe_latent_size"):
        writer.add_moe_latent_size(config["moe_latent_size"])


def _laguna(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_head_count(config["num_attention_heads_per_layer"])
    writer.add_expert_weights_norm(True)
    width, ropes = config["head_dim"], config["rope_parameters"]
    for kind, end in (("full_attention", ""), ("sliding_attention", "_swa")):
        turned = int(width * ropes[kind].get("partial_rotary_factor", 1))
        getattr(writer, f"add_rope_dimension_count{end}")(turned)
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
