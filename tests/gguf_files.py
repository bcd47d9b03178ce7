"""Write GGUF files from small checkpoints, with the rules of llama.cpp's converter.

Names of tensors come from the map of the package `gguf`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from torch import Tensor

from tests.gguf_blocks import nvfp4, packed
from tests.gguf_deltas import delta, kimi
from tests.gguf_gemma4 import add_gemma4_keys, gemma4_scale
from tests.gguf_modules import behind, module_count, module_name
from tests.gguf_recent import (
    CLASSES,
    NAMES,
    RECENT,
    SIGMOID,
    SPELLINGS,
    add_recent_keys,
    changed,
    named,
    text_part,
)
from tests.gguf_tokens import add_tokens

Named = Iterator[tuple[str, Tensor]]
TypeOf = Callable[[str, Tensor], Kind]  # (name in the file, values) -> its type
ARCHITECTURES = {  # model_type -> GGUF's architecture
    "arctic": gguf.MODEL_ARCH.ARCTIC,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
    "gemma4_text": gguf.MODEL_ARCH.GEMMA4,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    "glm4_moe_lite": gguf.MODEL_ARCH.DEEPSEEK2,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "granitemoe": gguf.MODEL_ARCH.GRANITE_MOE,
    "granitemoeshared": gguf.MODEL_ARCH.GRANITE_MOE,
    "kimi_linear": gguf.MODEL_ARCH.KIMI_LINEAR,
    "mimo_v2_flash": gguf.MODEL_ARCH.MIMO2,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "phimoe": gguf.MODEL_ARCH.PHIMOE,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    **RECENT,
}
_LATENT = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "kimi_linear",
    "mistral4",
)
_PAIRED = ("mixtral", "arctic", "granitemoe", "granitemoehybrid", "granitemoeshared")


def float32(name: str, values: Tensor) -> Kind:
    return Kind.F32


def matrices(kind: Kind) -> TypeOf:
    """Return the choice of a converter: `kind` for matrices whose rows fit, else F32."""
    block = gguf.GGML_QUANT_SIZES[kind][0]

    def choose(name: str, values: Tensor) -> Kind:
        plain = values.dim() < 2 or "gate_inp" in name or values.shape[-1] % block
        return Kind.F32 if plain else kind

    return choose


def write_gguf(
    folder: Path,
    path: Path,
    type_of: TypeOf = float32,
    split: int = 0,
    tokens: bool = True,
    source: str = "",
) -> Path:
    """Write the checkpoint in `folder` as a GGUF file; return the (first) file.

    split: tensors per file; 0 writes one file. source: the repository that the metadata names.
    """
    config = json.loads((folder / "config.json").read_text())
    config = config | config.pop("text_config", {})
    config |= {ours: config[theirs] for theirs, ours in SPELLINGS.items() if theirs in config}
    if "layers_block_type" in config:
        config["num_hidden_layers"] = len(config["layers_block_type"])
    if "mlp_layer_types" in config:
        config["first_k_dense_replace"] = config["mlp_layer_types"].count("dense")
    config["model_type"] = CLASSES.get(config["model_type"], config["model_type"])
    arch = ARCHITECTURES[config["model_type"]]
    stored: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= text_part(load_file(file))
    modules, stored = module_count(stored), behind(stored, config)
    blocks = config["num_hidden_layers"] + modules
    common = dict(gguf.TensorNameMap.block_mappings_cfg)  # a map of arctic would change it
    with mock.patch.object(gguf.TensorNameMap, "block_mappings_cfg", common):
        names = gguf.get_tensor_name_map(arch, blocks)
    written = NAMES.get(config["model_type"], gguf.MODEL_ARCH_NAMES[arch])
    writer = gguf.GGUFWriter(path, written, split_max_tensors=split)
    _add_keys(writer, config, blocks)
    if modules:
        writer.add_nextn_predict_layers(modules)
    if source:
        writer.add_source_repo_url(f"https://huggingface.co/{source}")
    if tokens:
        count = add_tokens(writer, json.loads((folder / "tokenizer.json").read_text()))
        writer.add_tokenizer_pre("glm4" if config["model_type"].startswith("glm4") else "gpt-2")
        if (template := folder / "chat_template.jinja").exists():
            writer.add_chat_template(template.read_text())
        eos = config.get("eos_token_id")
        if isinstance(eos, int) and eos < count:  # tiny tokenizers lack the original's
            writer.add_eos_token_id(eos)
    for name, values in _converted(stored, config):
        both = (names.get_name(n, (".weight", ".bias")) for n in (name, name[len("model.") :]))
        mapped = module_name(name) or next(filter(None, both), None) or gemma4_scale(name)
        mapped = mapped or named(name)
        assert mapped is not None, name
        kind = type_of(mapped, values)
        if kind == Kind.NVFP4:
            _add_nvfp4(writer, mapped, values)
            continue
        data = values.numpy() if values.dtype == torch.uint8 else quantised(values, kind)
        if values.dtype == torch.uint8:  # MXFP4 already
            kind = Kind.MXFP4
        writer.add_tensor(mapped, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not split else sorted(path.parent.glob(f"{path.stem}-*.gguf"))[0]


def _add_nvfp4(writer: gguf.GGUFWriter, name: str, values: Tensor) -> None:
    """Write a matrix or all experts of a layer with their factors, and those of activations."""
    alone = values if "_exps." in name else values.flatten(0, -2)
    data, factors = nvfp4(alone.float())
    data = data.view(*values.shape[:-1], -1)
    writer.add_tensor(name, data.numpy(), raw_dtype=Kind.NVFP4)
    stem = name.removesuffix(".weight")
    writer.add_tensor(f"{stem}.scale", factors.view(-1).numpy())
    writer.add_tensor(f"{stem}.input_scale", np.full(factors.numel(), 0.5, np.float32))


def quantised(values: Tensor, kind: Kind) -> Any:
    """Return the values [..., K] as rows of a type."""
    if kind.name.endswith("_K"):  # the package only reads these
        rows = packed(values.float().flatten(0, -2), kind.name.replace("_", "").lower())
        return rows.view(*values.shape[:-1], -1).numpy()
    return gguf.quants.quantize(values.float().contiguous().numpy(), kind)


def _add_keys(writer: gguf.GGUFWriter, config: Mapping[str, Any], blocks: int) -> None:
    """Write what every architecture has, as TextModel.set_gguf_parameters does."""
    writer.add_block_count(blocks)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    if config.get("intermediate_size"):
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(_key_heads(config))
    if config["model_type"] == "gemma4_text":
        add_gemma4_keys(writer, config)
        return
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for key in ("attn_factor", "beta_fast", "beta_slow"):
            value = rope.get("attention_factor" if key == "attn_factor" else key)
            if value is not None:
                getattr(writer, f"add_rope_scaling_yarn_{key}")(value)
    if kind == "longrope":
        _add_long_factors(writer, rope)
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is not None:
        writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-5))
    experts = ("num_local_experts", "num_experts", "n_routed_experts")
    writer.add_expert_count(next(config[key] for key in experts if config.get(key)))
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if config["model_type"] in _LATENT:
        _add_latent_keys(writer, config)
    elif config.get("head_dim") is not None:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config.get("v_head_dim", config["head_dim"]))

    _add_more_keys(writer, config)


def _key_heads(config: Mapping[str, Any]) -> int | list[int]:
    """Return the key heads that a file has, of each layer where layers differ."""
    latent, count = config["model_type"] in _LATENT, config["num_key_value_heads"]
    if config["model_type"] == "kimi_linear":
        return [int(kind == "full_attention") for kind in config["layer_types"]]
    if config["model_type"] in ("granitemoehybrid", "lfm2_moe", "nemotron_h"):
        kinds = config.get("layer_types") or config["layers_block_type"]
        return [count * (kind in ("attention", "full_attention")) for kind in kinds]
    if config["model_type"] == "mimo_v2_flash":
        return [count * (1 + (kind == "sliding_attention")) for kind in config["layer_types"]]
    return 1 if latent else count


def _add_long_factors(writer: gguf.GGUFWriter, rope: Mapping[str, Any]) -> None:
    """Write what Phi3MiniModel does, with the factor of the config in place of a derived one."""
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_attn_factors(rope["short_mscale"])
    for name in ("long", "short"):
        values = np.array(rope[f"{name}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{name}.weight", values)


def _add_latent_keys(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """Write what DeepseekV2Model.set_gguf_parameters does."""
    rank, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + turned)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + turned)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(turned)
    mscale = (config.get("rope_parameters") or {}).get("mscale_all_dim")
    if mscale is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * mscale)


def _add_more_keys(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """Write what single architectures have."""
    family, adders = config["model_type"], {
        "n_group": writer.add_expert_group_count,
        "topk_group": writer.add_expert_group_used_count,
        "n_shared_experts": writer.add_expert_shared_count,
        "routed_scaling_factor": writer.add_expert_weights_scale,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "shared_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "first_k_dense_replace": writer.add_leading_dense_block_count,
        "attention_multiplier": writer.add_attention_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
        "linear_conv_kernel_dim": writer.add_ssm_conv_kernel,
        "linear_key_head_dim": writer.add_ssm_state_size,
        "linear_num_key_heads": writer.add_ssm_group_count,
        "linear_num_value_heads": writer.add_ssm_time_step_rank,
    }  # fmt: skip
    for key, add in adders.items():
        if config.get(key) is not None:
            add(config[key])
    if family in (*_LATENT, "glm4_moe") and config.get("norm_topk_prob"):
        writer.add_expert_weights_norm(True)
    if family in ("deepseek_v3", "glm4_moe", "glm4_moe_lite", *SIGMOID):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    rope = config.get("rope_parameters") or {}
    if family in ("glm4_moe", "qwen3_5_moe_text"):
        share = rope.get("partial_rotary_factor", 0.5)
        writer.add_rope_dimension_count(int(config["head_dim"] * share))
    if family in ("gpt_oss", "phimoe"):
        writer.add_sliding_window(config["sliding_window"] or 0)
    if family == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if family == "kimi_linear":
        writer.add_kda_head_dim(config["linear_head_dim"])
    add_recent_keys(writer, config)
    if family == "qwen3_5_moe_text":
        inner = config["linear_value_head_dim"] * config["linear_num_value_heads"]
        writer.add_ssm_inner_size(inner)


def _converted(stored: Mapping[str, Tensor], config: Mapping[str, Any]) -> Named:
    """Yield (name of the checkpoint, values), with the experts of a layer stacked."""
    stored, stacks = dict(stored), dict[str, dict[int, Tensor]]()
    for name in [name for name in stored if name.endswith("_blocks")]:
        scales = stored.pop(name.replace("_blocks", "_scales"))
        yield from _mxfp4(name, stored.pop(name), scales)
    for name, values in stored.items():
        before, found, after = name.partition(".experts.")
        number, _, role = after.partition(".")
        if found and number.isdecimal():
            stacks.setdefault(f"{before}.experts.{role}", {})[int(number)] = values
        else:
            yield from _changed(name, values, config)
    for name, experts in stacks.items():
        yield name, torch.stack([experts[number] for number in range(len(experts))])


def _changed(name: str, values: Tensor, config: Mapping[str, Any]) -> Named:
    """Yield a tensor as the converter of its architecture changes it."""
    family = config["model_type"]
    tied = name == "lm_head.weight" and config.get("tie_word_embeddings")
    if tied or not values.numel():
        return
    if name.endswith("e_score_correction_bias"):
        name = name.replace("_bias", ".bias")
    if family in _PAIRED and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
        halves = values.reshape(config[heads], 2, -1, values.shape[1])
        values = halves.swapaxes(1, 2).reshape(values.shape)
    if family in _LATENT and name.endswith("kv_b_proj.weight"):
        yield from _latent(name, values, config)
    elif family == "granitemoeshared" and ".shared_mlp.input_linear." in name:
        for role, half in zip(("gate", "up"), values.chunk(2), strict=True):
            yield f"model.layers.{name.split('.')[2]}.mlp.shared_expert.{role}_proj.weight", half
    elif family.startswith("granitemoe") and ".block_sparse_moe." in name and "_linear." in name:
        yield from _fused(name, values, ".input_linear.weight", ".output_linear.weight")
    elif family == "qwen3_5_moe_text" and ".mlp.experts." in name:
        yield from _fused(name, values, ".gate_up_proj", ".down_proj")
    elif family == "qwen3_5_moe_text":
        yield delta(name, values, config)
    elif family == "gemma4_text" and not name.endswith((".weight", "scale")):
        yield f"{name}.weight", values
    elif family == "gpt_oss":
        yield from _gpt_oss(name, values)
    elif family == "kimi_linear":
        yield kimi(name, values)
    elif family in RECENT:
        yield from changed(name, values, config)
    elif name.endswith(".attention_sink_bias"):
        yield name.replace("attention_sink_bias", "sinks.weight"), values
    else:
        yield name, values


def _latent(name: str, values: Tensor, config: Mapping[str, Any]) -> Named:
    nope, wide = config["qk_nope_head_dim"], config["v_head_dim"]
    both = values.view(config["num_attention_heads"], nope + wide, -1)
    yield name.replace("kv_b_proj", "k_b_proj"), both[:, :nope].transpose(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), both[:, nope:]


def _fused(name: str, values: Tensor, gate_up: str, down: str) -> Named:
    if name.endswith(down):
        yield f"{_experts(name)}.down_proj.weight", values
        return
    assert name.endswith(gate_up)
    for role, half in zip(("gate", "up"), values.chunk(2, 1), strict=True):
        yield f"{_experts(name)}.{role}_proj.weight", half


def _experts(name: str) -> str:
    return f"model.layers.{name.split('.')[2]}.mlp.experts"


def _gpt_oss(name: str, values: Tensor) -> Named:
    if name.endswith("sinks"):
        yield name + ".weight", values
        return
    if ".mlp.experts." not in name:
        yield name, values
        return
    suffix = "bias" if name.endswith("_bias") else "weight"
    rows = values if suffix == "bias" else values.transpose(1, 2)
    if "down_proj" in name:
        yield f"{_experts(name)}.down_proj.{suffix}", rows
        return
    yield f"{_experts(name)}.gate_proj.{suffix}", rows[:, ::2]
    yield f"{_experts(name)}.up_proj.{suffix}", rows[:, 1::2]


def _mxfp4(name: str, blocks: Tensor, scales: Tensor) -> Named:
    """Yield blocks [E, R, G, 16] with scales as GGML's: the scale first, j beside j + 16."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)  # [E, R, G, 32]
    halves = codes[..., :16] | codes[..., 16:] << 4
    packed = torch.cat((scales[..., None], halves), -1).flatten(2)  # [E, R, 17 G]
    if "down_proj" in name:
        yield f"{_experts(name)}.down_proj.weight", packed
        return
    yield f"{_experts(name)}.gate_proj.weight", packed[:, ::2].contiguous()
    yield f"{_experts(name)}.up_proj.weight", packed[:, 1::2].contiguous()
