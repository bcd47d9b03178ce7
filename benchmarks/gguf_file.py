"""Write a shape as a GGUF file.

Run: python -m benchmarks.gguf_file OUT Q4_0|Q8_0|BF16|F16 < shape.json
Runs in the peer's Python, with numpy, gguf and llama_cpp but without moeinf. Types are those that
llama-quantize chooses: norms and routers F32, Q4_0 with a Q6_K head. Quantised rows are cut from a
quantised tile of the noise. The result is the same as quantising each tensor, because groups have
the same bounds in both.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from benchmarks.noise import GROUP, cut, span_of, tile

_ARCHITECTURES = {
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
}
_EXPERT = re.compile(
    r"(model\.layers\.\d+\.(?:mlp|block_sparse_moe)\.experts)\.(\d+)\.(\w+_proj|w[123])\.weight"
)
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_SUPER = 256  # weights in a block of Q6_K

Array = NDArray[Any]


@cache
def noise() -> Array:
    """Return the noise: [TILE / GROUP, GROUP] float32."""
    wide: Array = (tile().astype(np.uint32) << 16).view(np.float32).reshape(-1, GROUP)
    return wide


@cache
def quantised_noise(kind: Kind) -> Array:
    """Return the noise quantised: [TILE / GROUP, bytes of a group]."""
    data: Array = gguf.quants.quantize(noise(), kind)
    return data.view(np.uint8)


_given: dict[str, Path] = {}  # tensors that are not noise: files of bfloat16 items


def plain(name: str, count: int) -> Array:
    """Return the items of a tensor as float32."""
    if name in _given:
        bits = np.fromfile(_given[name], np.uint16, count).astype(np.uint32)
        return (bits << 16).view(np.float32)
    span = span_of(name, count)
    if span.ones:
        return np.ones(count, np.float32)
    return cut(noise(), span.start // GROUP, -(-count // GROUP)).reshape(-1)[:count]


def stored(name: str, shape: tuple[int, ...], kind: Kind) -> Array:
    """Return the bytes of a tensor of type `kind`; rows are whole groups unless it is F32."""
    count = int(np.prod(shape))
    span = span_of(name, count)
    if kind == Kind.F32:
        return plain(name, count).view(np.uint8)
    if kind == Kind.Q6_K:
        return _q6_k(plain(name, count).reshape(shape))
    if name in _given:
        return gguf.quants.quantize(plain(name, count).reshape(shape), kind).view(np.uint8).ravel()
    return cut(quantised_noise(kind), span.start // GROUP, count // GROUP).reshape(-1)


def _q6_k(rows: Array) -> Array:
    """Quantise by ggml itself; its Python package has no Q6_K."""
    import llama_cpp  # pyright: ignore[reportMissingImports]

    folder = Path(llama_cpp.__file__).parent / "lib"
    quantise = ctypes.CDLL(str(next(folder.glob("libggml-base.*")))).ggml_quantize_chunk
    quantise.restype = ctypes.c_size_t
    quantise.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p] + [ctypes.c_int64] * 3
    quantise.argtypes += [ctypes.c_void_p]
    rows = np.ascontiguousarray(rows, np.float32)
    out = np.empty(rows.size // _SUPER * gguf.GGML_QUANT_SIZES[Kind.Q6_K][1], np.uint8)
    done = quantise(int(Kind.Q6_K), rows.ctypes.data, out.ctypes.data, 0, *rows.shape, None)
    assert done == out.nbytes, (done, out.nbytes)
    return out


def kind_of(name: str, sides: int, wanted: Kind) -> Kind:
    """Return the type that llama-quantize would store the tensor in."""
    if sides == 1 or name.endswith("ffn_gate_inp.weight"):
        return Kind.F32
    if name == "output.weight" and wanted == Kind.Q4_0:
        return Kind.Q6_K
    return wanted


def write(
    out: Path, config: dict[str, Any], names: list[tuple[str, tuple[int, ...]]], to: Kind
) -> None:
    """Write the file tensor by tensor."""
    architecture = _ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(out, gguf.MODEL_ARCH_NAMES[architecture])
    _describe(writer, config)
    jobs = []
    for name, shape, sources in _merged(config, names):
        kind = kind_of(name, len(shape), to)
        size = (
            int(np.prod(shape)) * gguf.GGML_QUANT_SIZES[kind][1] // gguf.GGML_QUANT_SIZES[kind][0]
        )
        writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=kind)
        jobs.append((kind, sources))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for kind, sources in jobs:
        parts = [make(kind) if callable(make) else stored(*make, kind) for make in sources]
        writer.write_tensor_data(np.concatenate(parts) if len(parts) > 1 else parts[0])
    writer.close()


def _merged(
    config: dict[str, Any], names: list[tuple[str, tuple[int, ...]]]
) -> Iterator[tuple[str, tuple[int, ...], list[Any]]]:
    """Yield (GGUF name, shape, sources of the bytes): experts stacked, MLA's kv_b split in two."""
    known = gguf.get_tensor_name_map(
        _ARCHITECTURES[config["model_type"]], config["num_hidden_layers"]
    )
    stacks: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, shape in names:
        match = _EXPERT.fullmatch(name)
        if match:
            stacks.setdefault(f"{match[1]}.{match[3]}.weight", []).append((name, shape))
        elif name.endswith("kv_b_proj.weight"):
            yield from _split_kv_b(config, name, shape, known)
        else:
            yield _named(known, name), shape, [(name, shape)]
    for stack, parts in stacks.items():
        yield _named(known, stack), (len(parts), *parts[0][1]), parts


def _split_kv_b(
    config: dict[str, Any], name: str, shape: tuple[int, ...], known: Any
) -> Iterator[tuple[str, tuple[int, ...], list[Any]]]:
    """Split kv_b like llama.cpp's converter: keys transposed per head, for the absorbed product."""
    heads, nope, value = (
        config[k] for k in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim")
    )
    both = plain(name, int(np.prod(shape))).reshape(heads, nope + value, shape[1])

    def of(part: Array) -> Any:
        return lambda kind: (
            gguf.quants.quantize(np.ascontiguousarray(part), kind).view(np.uint8).reshape(-1)
        )

    keys, values = both[:, :nope].transpose(0, 2, 1), both[:, nope:]
    yield _named(known, name.replace("kv_b_proj", "k_b_proj")), keys.shape, [of(keys)]
    yield _named(known, name.replace("kv_b_proj", "v_b_proj")), values.shape, [of(values)]


def _named(known: Any, name: str) -> str:
    found: str | None = known.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def _describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Write the keys that llama.cpp reads, and a vocabulary without texts."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    experts = next(config[name] for name in _EXPERTS if name in config)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    if config["model_type"] == "deepseek_v2":
        _describe_mla(writer, config)
        return
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _describe_mla(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_q_lora_rank(config["q_lora_rank"] or 0)
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(latent + rope)
    writer.add_value_length(latent)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rope)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    scaling = config["rope_scaling"]
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(scaling["factor"])
    writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])


def main() -> None:
    about = json.load(sys.stdin)
    names = [(name, tuple(shape)) for name, shape in about["tensors"]]
    _given.update((name, Path(file)) for name, file in about.get("given", {}).items())
    write(Path(sys.argv[1]), about["config"], names, Kind[sys.argv[2]])


if __name__ == "__main__":
    main()
