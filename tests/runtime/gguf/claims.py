"""Write GGUF files whose headers claim more than any model has."""

from __future__ import annotations

import math
import struct
from pathlib import Path

from tests.runtime.gguf.test_header import ARRAY, F32, STRING, U32, header, pair, tensor, text


def number(key: str, value: int) -> bytes:
    return pair(key, U32, struct.pack("<I", value))


def stacked(path: Path, experts: int, layers: int = 1) -> Path:
    """Write a model of stacked experts with one weight in each matrix. Its data is a hole."""
    keys = {"block_count": layers, "expert_count": experts, "expert_used_count": 2}
    keys |= {"embedding_length": 1, "context_length": 64, "feed_forward_length": 1}
    keys |= {"attention.head_count": 1, "attention.head_count_kv": 1}
    pairs = [
        pair("general.architecture", STRING, text("llama")),
        pair("llama.attention.layer_norm_rms_epsilon", F32, struct.pack("<f", 1e-5)),
        *(number(f"llama.{key}", value) for key, value in keys.items()),
        pair("tokenizer.ggml.model", STRING, text("gpt2")),
        pair("tokenizer.ggml.pre", STRING, text("llama-bpe")),
        pair("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + text("b")),
        pair("tokenizer.ggml.token_type", ARRAY, struct.pack("<IQ2I", U32, 2, 1, 1)),
        *(number(f"tokenizer.ggml.{end}_token_id", 0) for end in ("bos", "eos")),
    ]
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (1, 2)}
    for layer in range(layers):
        shapes[f"blk.{layer}.ffn_gate_inp.weight"] = (1, experts)
        for role in ("gate", "up", "down"):
            shapes[f"blk.{layer}.ffn_{role}_exps.weight"] = (1, 1, experts)
    tensors, at = [], 0
    for name, shape in shapes.items():
        tensors.append(tensor(name, shape, 0, at))
        at += -(-4 * math.prod(shape) // 32) * 32
    return _write(path, header(pairs, tensors, data=0), at)


def split(folder: Path, parts: int, items: int) -> Path:
    """Write a split file. Each part has an array of empty strings that no reader needs."""
    for part in range(parts):
        pairs = [number("split.no", part), number("split.count", parts)]
        array = pair("x.unread", ARRAY, struct.pack("<IQ", STRING, items))
        name = f"x-{part + 1:05}-of-{parts:05}.gguf"
        _write(folder / name, header([*pairs, array], data=0).rstrip(b"\0"), 8 * items + 64)
    return folder / f"x-00001-of-{parts:05}.gguf"


def _write(path: Path, start: bytes, hole: int) -> Path:
    with path.open("wb") as file:
        file.write(start)
        file.truncate(len(start) + hole)
    return path
