"""Join the two halves of DeepSeek's kv_b projection, which llama.cpp stores apart."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moeinf.runtime.gguf.keys import Keys
from moeinf.runtime.gguf.made import Made

_Sides = tuple[int, ...]


def _joined(keys: Keys, key: _Sides, value: _Sides) -> tuple[_Sides, Callable[..., Tensor]]:
    """k_b [H, rank, nope] is transposed, v_b [H, v, rank] is not -> [H (nope + v), rank]."""
    if len(key) != 3 or len(value) != 3 or (key[0], key[1]) != (value[0], value[2]):
        raise keys.bad("has attn_k_b and attn_v_b of shapes that do not fit")
    heads, rank, nope = key

    def make(k: Tensor, v: Tensor) -> Tensor:
        return torch.cat((k.transpose(1, 2), v), 1).reshape(-1, rank)

    return (heads * (nope + value[1]), rank), make


KV_B = Made(("attn_k_b.weight", "attn_v_b.weight"), _joined, sliced=True)
