"""Compare the expert kernels with the read ceiling and torch's int4 product, in one run.

Run: python -m benchmarks.kernels [--shape olmoe] [--megabytes 400] [--rounds 8] [--path avx2]
Every round measures, one after the other:

- six read loops: 1 and 2 threads, plain, with prefetch, and with prefetch on huge pages
- the q4 and q8 experts of one token, eight to a call, over a working set far above the caches
- the same right after a product of torch on one thread, as in decoding, and on all its threads
- torch's `_weight_int4pack_mm_for_cpu` over the same number of bytes

Prints medians in GB/s of weights, and the medians of each round's ratios to the best of its six
loops and to torch. Ratios are per round because other programs change memory speed by a factor of
two within a minute.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch

from moeinf.native import (
    ExpertKernel,
    SlotPool,
    _native,
    kernel_path,
    read_bandwidth,
    set_compute_threads,
)
from moeinf.offload.format.layout import ExpertLayout

SHAPES = {
    "olmoe": (2048, 1024),
    "deepseek-v2-lite": (2048, 1408),
    "qwen3-30b-a3b": (2048, 768),
    "mixtral": (4096, 14336),
}
PER_CALL = 8
CALLS = 10


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Experts:
    """Experts of random codes that fill about `size` bytes, visited in a fixed random order."""

    def __init__(self, form: str, hidden: int, inner: int, size: int) -> None:
        layout = ExpertLayout(hidden, inner, form.upper())
        self.bytes = layout.data_bytes
        self._count = max(2 * PER_CALL, size // layout.slot_bytes)
        self._pool = torch.frombuffer(SlotPool(self._count, layout.slot_bytes), dtype=torch.uint8)
        self._pool.random_(0, 60)  # as float16 scales, below 2
        order = torch.randperm(self._count, generator=torch.Generator().manual_seed(0)).tolist()
        base = self._pool.data_ptr()
        self._next = itertools.cycle([base + slot * layout.slot_bytes for slot in order])
        self._kernel = ExpertKernel(form, hidden, inner)
        self._x = torch.randn(1, hidden).bfloat16()
        self._out = torch.empty(PER_CALL, hidden, dtype=torch.bfloat16)

    def call(self) -> None:
        experts = list(itertools.islice(self._next, PER_CALL))
        self._kernel.run(
            experts, [[place] for place in range(PER_CALL)], self._x.data_ptr(), 1, PER_CALL,
            self._out.data_ptr(), False,
        )  # fmt: skip

    def speed(self, between: Callable[[], object] | None = None) -> float:
        spent = 0.0
        for _ in range(CALLS):
            if between is not None:
                between()
            spent += seconds(self.call)
        return CALLS * PER_CALL * self.bytes / spent


def read_loops(size: int) -> Iterator[tuple[str, Callable[[], float]]]:
    """Yield six named loops, the same as `moeinf devices` runs."""
    kinds = (("", False, False), (", prefetch", True, False), (", huge pages", True, True))
    for threads, (suffix, prefetch, huge) in itertools.product((1, 2), kinds):
        name = f"read, {threads} thread{'s' * (threads - 1)}{suffix}"
        yield name, functools.partial(read_bandwidth, size, threads, prefetch, huge, 2)


def torch_int4(hidden: int, inner: int, size: int) -> Callable[[], float]:
    """Return a timed torch product with packed int4 weights [F, D], groups of 32.

    Its weights take `size` bytes.
    """
    codes = torch.randint(0, 16, (inner, hidden), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    one = packed.numel() * packed.element_size()
    weights = [packed.clone() for _ in range(max(4, size // one))]
    scales = torch.rand(hidden // 32, inner, 2).bfloat16()
    order = itertools.cycle(weights)
    x = torch.randn(1, hidden).bfloat16()
    stored = one + scales.numel() * 2

    def run() -> float:
        count = CALLS * PER_CALL

        def products() -> None:
            for weight in itertools.islice(order, count):
                torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight, 32, scales)

        return count * stored / seconds(products)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="olmoe")
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--forms", default="q4,q8", help="q3, q2, q4k, q5k, q6k, nvfp4, mxfp4, bf16, too"
    )
    parser.add_argument("--path", default="", help="avx512, avx2 or portable; default: the fastest")
    options = parser.parse_args()
    if not _native._use_kernels(options.path):
        parser.error(f"--path: {options.path!r} is unknown, or this processor lacks it")
    (hidden, inner), size = SHAPES[options.shape], options.megabytes << 20
    a, b = torch.randn(256, 1024), torch.randn(1024, 1024)
    experts = {form: Experts(form, hidden, inner, size) for form in options.forms.split(",")}

    def ours(form: str, threads: int, between: Callable[[], object] | None) -> float:
        set_compute_threads(threads)
        return experts[form].speed(between)

    loops: dict[str, Callable[[], float]] = dict(read_loops(size))
    ceiling_names = list(loops)
    for form, threads in itertools.product(experts, (1, 2)):
        name = f"{form}, {threads} thread{'s' * (threads - 1)}"
        loops[name] = lambda form=form, threads=threads: ours(form, threads, None)
    everywhere = torch.get_num_threads()

    def after_torch(form: str, torchs: int) -> float:
        torch.set_num_threads(torchs)
        try:
            return ours(form, 2, lambda: a @ b)
        finally:
            torch.set_num_threads(everywhere)

    for form, torchs in itertools.product(experts, (1, everywhere)):
        name = f"{form}, 2 threads, between products of torch on {torchs}"
        loops[name] = functools.partial(after_torch, form, torchs)
    loops["torch int4"] = torch_int4(hidden, inner, size)
    found: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(options.rounds):
        for name, loop in loops.items():
            found[name].append(loop() / 1e9)
    medians = {name: statistics.median(values) for name, values in found.items()}
    ceilings = [
        max(found[name][number] for name in ceiling_names) for number in range(options.rounds)
    ]
    write = sys.stdout.write
    write(f"{options.shape}: D {hidden}, F {inner}, {kernel_path()}, {options.megabytes} MiB\n\n")
    write("| loop | GB/s | range | of the ceiling | times torch int4 |\n|---|---|---|---|---|\n")
    for name, values in found.items():
        low, high, median = min(values), max(values), medians[name]
        of_ceiling, times = (
            statistics.median(value / other for value, other in zip(values, others, strict=True))
            for others in (ceilings, found["torch int4"])
        )
        write(
            f"| {name} | {median:.1f} | {low:.1f}–{high:.1f} | {of_ceiling:.2f} | {times:.2f} |\n"
        )


if __name__ == "__main__":
    main()
