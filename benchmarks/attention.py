"""python -m benchmarks.attention: measure decode attention against memory and arithmetic limits.

Every round measures the ceilings and all cases once. A line gives the medians of the rounds'
ratios. Working sets are far larger than the caches.

    read     the best of six loops: 1 and all threads, without and with prefetch (two distances)
    multiply the instruction that the path multiplies with, operands in registers
    roofline the longer of bytes ÷ read and products ÷ multiply
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from moeinf.native import DecodeAttention, _native, attention_path, compute_threads

_POOL_BYTES = 768 << 20


@dataclass(frozen=True)
class Shape:
    name: str
    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    latent: bool = False

    def items(self, keys: int) -> int:
        """Return the number of items in one layer's cache."""
        width = self.key_width if self.latent else self.key_width + self.value_width
        return self.kv_heads * keys * width

    def products(self, keys: int) -> int:
        return self.heads * keys * (self.key_width + self.value_width)


SHAPES = (
    Shape("OLMoE-1B-7B", 16, 16, 128, 128),
    Shape("Mixtral-8x7B", 32, 8, 128, 128),
    Shape("Qwen3-30B-A3B", 32, 4, 128, 128),
    Shape("DeepSeek-V2-Lite", 16, 1, 576, 512, latent=True),
)


class Case:
    """One shape and length, over all layers that fit into the pool."""

    def __init__(self, shape: Shape, keys: int, pool: Tensor) -> None:
        self.shape, self.keys = shape, keys
        items = shape.items(keys)
        self._layers = max(1, len(pool) // items)
        self._attend = DecodeAttention(
            shape.heads,
            shape.kv_heads,
            shape.key_width,
            shape.value_width,
            shape.key_width**-0.5,
            bf16=True,
        )
        self._q = torch.randn(shape.heads, shape.key_width).bfloat16()
        self._out = torch.empty(shape.heads, shape.value_width, dtype=torch.bfloat16)
        keys_items = shape.kv_heads * keys * shape.key_width
        strides = (shape.key_width * keys, shape.key_width)
        strides += strides if shape.latent else (shape.value_width * keys, shape.value_width)
        self._requests = []
        for layer in range(self._layers):
            k = pool.data_ptr() + 2 * layer * items
            v = k if shape.latent else k + 2 * keys_items
            self._requests.append([(k, v, *strides, keys)])

    def seconds(self, path: str) -> float:
        """Return the mean seconds of one layer."""
        q, out = self._q.data_ptr(), self._out.data_ptr()
        start = time.perf_counter()
        for requests in self._requests:
            self._attend(q, out, requests, path)
        return (time.perf_counter() - start) / self._layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--path", default=attention_path(), help="a slower path than the default")
    parser.add_argument("--huge", action="store_true", help="caches in huge pages")
    o = parser.parse_args()
    memory = mmap.mmap(-1, _POOL_BYTES)
    memory.madvise(mmap.MADV_HUGEPAGE if o.huge else mmap.MADV_NOHUGEPAGE)
    pool = torch.frombuffer(memory, dtype=torch.int16)
    noise = torch.randn(1 << 20).bfloat16().view(torch.int16)
    pool.view(-1, len(noise))[:] = noise
    cases = [Case(shape, keys, pool) for shape in SHAPES for keys in o.keys]
    taken: list[list[tuple[float, float, float]]] = [[] for _ in cases]  # µs, of read, of roofline
    reads, multiplies = [], []
    for _ in range(o.rounds):
        read = max(
            _native._measure_reading(pool.data_ptr(), _POOL_BYTES // 2, threads, ahead)
            for threads in {1, compute_threads()}
            for ahead in (0, 1024, 8192)
        )
        multiply = _native._measure_products(o.path)
        reads.append(read)
        multiplies.append(multiply)
        for case, results in zip(cases, taken, strict=True):
            seconds = case.seconds(o.path)
            least_read = 2 * case.shape.items(case.keys) / read
            least = max(least_read, case.shape.products(case.keys) / multiply)
            results.append((seconds * 1e6, least_read / seconds, least / seconds))
    print(
        f"{o.path}, {compute_threads()} threads, {o.rounds} rounds; "
        f"read {statistics.median(reads) / 1e9:.1f} GB/s ({min(reads) / 1e9:.1f} to "
        f"{max(reads) / 1e9:.1f}), multiply {statistics.median(multiplies) / 1e9:.0f} G/s\n"
    )
    print("| shape | keys | µs | of read | of roofline | lowest, highest round |")
    print("|---|---|---|---|---|---|")
    for case, results in zip(cases, taken, strict=True):
        micros, of_read, of_roofline = (statistics.median(x) for x in zip(*results, strict=True))
        ends = sorted(roofline for _, _, roofline in results)
        print(
            f"| {case.shape.name} | {case.keys} | {micros:.0f} | {of_read:.0%} | "
            f"{of_roofline:.0%} | {ends[0]:.0%}, {ends[-1]:.0%} |"
        )


if __name__ == "__main__":
    main()
