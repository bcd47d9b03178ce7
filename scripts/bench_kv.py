"""Measure decode attention of one token over a KV cache in bf16 and in q8.

Run: python -m scripts.bench_kv [--tokens 4096,16384]

Layers of noise, up to 512 MiB in bf16, follow each other, so that no cache of the processor holds
them. Both forms take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import NamedTuple

import torch
from torch import Tensor

from moeinf.models.layers.kv_q8 import quantised
from moeinf.native import DecodeAttention, attention_path, set_compute_threads

_BYTES = 512 << 20
_ROUNDS = 5  # the first warms up


class Shape(NamedTuple):
    heads: int
    key_heads: int
    width: int
    value_width: int  # below width: MLA, whose values are the first columns of its keys


SHAPES = (Shape(16, 16, 128, 128), Shape(32, 4, 128, 128), Shape(16, 1, 576, 512))


def seconds(shape: Shape, layers: list[tuple[Tensor, Tensor]], tokens: int, q8: bool) -> float:
    """Return the seconds of one layer."""
    heads, key_heads, width, value_width = shape
    scale = width**-0.5
    attend = DecodeAttention(heads, key_heads, width, value_width, scale, bf16=True, q8=q8)
    q = torch.randn(heads, width).bfloat16()
    out = torch.empty(heads, value_width, dtype=torch.bfloat16)
    start = time.perf_counter()
    for k, v in layers:
        place = (k.data_ptr(), v.data_ptr(), *k.stride()[:2], *v.stride()[:2], tokens)
        attend(q.data_ptr(), out.data_ptr(), [place])
    return (time.perf_counter() - start) / len(layers)


def measure(shape: Shape, tokens: int) -> tuple[float, float]:
    """Return the milliseconds of a layer in bf16 and in q8."""
    latent = shape.value_width < shape.width
    noise = torch.randn(1 if latent else 2, shape.key_heads, tokens, shape.width).bfloat16()
    count = max(3, min(24, _BYTES // (noise.numel() * 2)))
    forms = [
        [(planes[0], planes[-1]) for planes in (rows.clone() for _ in range(count))]
        for rows in (noise, quantised(noise))
    ]
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        for form, layers in enumerate(forms):
            taken[form].append(seconds(shape, layers, tokens, q8=form == 1))
    bf16, q8 = (1e3 * statistics.median(times[1:]) for times in taken)
    return bf16, q8


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", default="4096,16384")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    set_compute_threads(options.threads)
    print(f"path {attention_path()}, {options.threads} threads")
    for tokens in map(int, options.tokens.split(",")):
        for shape in SHAPES:
            bf16, q8 = measure(shape, tokens)
            print(f"{shape[:3]} {tokens}: {bf16:.2f} ms, q8 {q8:.2f} ms, {bf16 / q8:.2f} times")


if __name__ == "__main__":
    main()
