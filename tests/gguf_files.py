"""Write GGUF files from small checkpoints, with the rules of llama.cpp's converter.

Names of tensors come from the map of the package `gguf`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from torch import Tensor

Named = Iterator[tuple[str, Tensor]]
TypeOf = Callable[[str, Tensor], Kind]  # (name in the file, values) -> its type
ARCHITECTURES = {  # model_type -> GGUF's architecture
    "olmoe": gguf.MODEL_ARCH.OLMOE,
}


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
    folder: Path, path: Path, type_of: TypeOf = float32, split: int = 0, tokens: bool = True
) -> Path:
    """Write the checkpoint in `folder` as a GGUF file; return the (first) file.

    split: tensors per file; 0 writes one file.
    """
    config = json.loads((folder / "config.json").read_text())
    config = config | config.pop("text_config", {})
    arch = ARCHITECTURES[config["model_type"]]
    stored: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= load_file(file)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch], split_max_tensors=split)
    _add_keys(writer, config)
    if tokens:
        _add_tokens(writer, json.loads((folder / "tokenizer.json").read_text()))
        if (template := folder / "chat_template.jinja").exists():
            writer.add_chat_template(template.read_text())
        if isinstance(config.get("eos_token_id"), int):
            writer.add_eos_token_id(config["eos_token_id"])
    for name, values in _converted(stored, config):
        mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert mapped is not None, name
        kind = type_of(mapped, values)
        data = gguf.quants.quantize(values.float().contiguous().numpy(), kind)
        writer.add_tensor(mapped, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not split else sorted(path.parent.glob(f"{path.stem}-*.gguf"))[0]


def _add_keys(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """Write what every architecture has, as TextModel.set_gguf_parameters does."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    rope = config.get("rope_parameters") or {}
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
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    experts = ("num_local_experts", "num_experts", "n_routed_experts")
    writer.add_expert_count(next(config[key] for key in experts if config.get(key)))
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if config.get("head_dim") is not None:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])


def _add_tokens(writer: gguf.GGUFWriter, tokenizer: Mapping[str, Any]) -> None:
    vocabulary = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    added = {token["id"]: token for token in tokenizer.get("added_tokens", [])}
    words = {number: text for text, number in vocabulary}
    words |= {number: token["content"] for number, token in added.items()}
    count = max(words) + 1
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([words.get(number, f"[PAD{number}]") for number in range(count)])
    writer.add_token_types([3 if number in added else 1 for number in range(count)])
    merges = tokenizer["model"].get("merges", [])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])


def _converted(stored: Mapping[str, Tensor], config: Mapping[str, Any]) -> Named:
    """Yield (name of the checkpoint, values), with the experts of a layer stacked."""
    stacks: dict[str, dict[int, Tensor]] = {}
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
    yield name, values
