"""Write an OLMoE checkpoint of any size with random weights, for measurements that need volume.

Run: python scripts/make_checkpoint.py FOLDER --gigabytes 6 [--layers 16 --experts 64 …]
Memory use stays small: the files are written tensor by tensor. The weights are one block of bf16
noise, repeated from changing offsets, so that writing is as fast as the disk.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_NOISE_ITEMS = 1 << 22


def config(
    layers: int, experts: int, hidden: int, intermediate: int, top_k: int
) -> dict[str, object]:
    """Return config.json of such a model."""
    return {
        "model_type": "olmoe",
        "architectures": ["OlmoeForCausalLM"],
        "hidden_act": "silu",
        "vocab_size": 256,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "norm_topk_prob": False,
        "tie_word_embeddings": False,
    }


def shapes(config: dict[str, object]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of all tensors, in the order of the hub."""
    h, f, v = (int(str(config[k])) for k in ("hidden_size", "intermediate_size", "vocab_size"))
    yield "model.embed_tokens.weight", (v, h)
    for layer in range(int(str(config["num_hidden_layers"]))):
        at = f"model.layers.{layer}"
        for name in ("q", "k", "v", "o"):
            yield f"{at}.self_attn.{name}_proj.weight", (h, h)
        for name in ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm"):
            yield f"{at}.{name}.weight", (h,)
        yield f"{at}.post_attention_layernorm.weight", (h,)
        yield f"{at}.mlp.gate.weight", (int(str(config["num_experts"])), h)
        for expert in range(int(str(config["num_experts"]))):
            yield f"{at}.mlp.experts.{expert}.down_proj.weight", (h, f)
            yield f"{at}.mlp.experts.{expert}.gate_proj.weight", (f, h)
            yield f"{at}.mlp.experts.{expert}.up_proj.weight", (f, h)
    yield "model.norm.weight", (h,)
    yield "lm_head.weight", (v, h)


def make_checkpoint(folder: Path, config: dict[str, object], file_bytes: int = 2 << 30) -> int:
    """Write config, tokenizer, index and safetensors files of about file_bytes; return bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    random = np.random.default_rng(0)
    values = random.normal(0, 0.02, _NOISE_ITEMS).astype(np.float32)
    noise = (values.view(np.uint32) >> 16).astype(np.uint16)  # bf16, rounded towards zero
    files: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    size = total = 0
    for name, shape in shapes(config):
        if size >= file_bytes:
            files.append([])
            size = 0
        files[-1].append((name, shape))
        size += 2 * int(np.prod(shape))
    weight_map = {}
    for number, tensors in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        weight_map.update({name: file for name, _ in tensors})
        total += _write(folder / file, tensors, noise)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _write(path: Path, tensors: list[tuple[str, tuple[int, ...]]], noise: np.ndarray) -> int:
    header, offset = {}, 0
    for name, shape in tensors:
        span = [offset, offset + 2 * int(np.prod(shape))]
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for number, (name, shape) in enumerate(tensors):
            if name.endswith("norm.weight"):
                file.write(np.full(shape, 0x3F80, np.uint16).tobytes())  # 1.0
                continue
            left, start = int(np.prod(shape)), number * 7919 % _NOISE_ITEMS
            while left:
                part = noise[start : start + left]
                file.write(part.data)
                left, start = left - len(part), 0
    return offset


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte and no others."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=6.0, help="chooses the number of layers")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=1024)
    parser.add_argument("--top-k", type=int, default=8)
    o = parser.parse_args()
    layer = 2 * o.hidden * (3 * o.experts * o.intermediate + 4 * o.hidden)
    layers = max(1, round(o.gigabytes * 1e9 / layer))
    about = config(layers, o.experts, o.hidden, o.intermediate, o.top_k)
    print(f"{make_checkpoint(o.folder, about)} bytes in {o.folder}, {layers} layers")


if __name__ == "__main__":
    main()
