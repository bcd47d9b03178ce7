"""How fast experts come over the bus, and how fast the CPU computes them, each beside the other.

Does not know plans or stores. Both figures are of experts of one format, in bytes per second, and
contended: copies and the CPU's kernels read the same memory at the same time, as in a layer whose
misses are divided between them.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from moeinf.native import DeviceContext, DeviceError, DeviceSlots, HostLock, SlotPool
from moeinf.offload.layout import ExpertLayout
from moeinf.offload.slot_math import SlotMath, TorchFfn
from moeinf.offload.split import Contended
from moeinf.runtime.memory import available_bytes, cache_bytes

_LEAST_BYTES = 64 << 20
_CACHES = (
    2  # the pool is so many times what all caches hold: then each round finds none of it there
)
_SECONDS = 0.25
_IN_BATCH = 4
_PATTERN = 0x11  # as bf16, f16 or f32 a small normal number: zeros and denormals have other speeds


class _Bench:
    """A pool full of experts, page-locked if the system allows it, and device slots to copy to."""

    def __init__(self, context: DeviceContext, slot_bytes: int, data_bytes: int) -> None:
        size = max(_LEAST_BYTES, min(_CACHES * cache_bytes(), available_bytes() // 4))
        self.pool = SlotPool(max(2 * _IN_BATCH, size // slot_bytes), slot_bytes)
        arena = torch.frombuffer(self.pool, dtype=torch.uint8)
        arena.fill_(_PATTERN)
        lock = HostLock(context, self.pool, self.pool.bytes)
        self.refusal: str | None = None
        try:
            lock.lock_next()
        except DeviceError as error:  # as in some containers; so will an engine's be
            self.refusal = str(error)
        self._slots = DeviceSlots(context, lock, 2 * _IN_BATCH, 0)
        self._bytes = data_bytes
        self._batches = self._flying = 0

    def copy(self) -> int:
        """Queues one batch, and waits for the one before: the bus is never idle. Its bytes."""
        begin = self._batches * _IN_BATCH
        chosen = [(begin + i) % self.pool.slots for i in range(_IN_BATCH)]
        half = self._batches % 2 * _IN_BATCH
        before = self._flying
        self._flying = self._slots.copy(chosen, list(range(half, half + _IN_BATCH)), self._bytes)
        self._batches += 1
        if before:
            self._slots.wait(before)
        return _IN_BATCH * self._bytes


class Bus(NamedTuple):
    """From host slots. refusal: why they could not be page-locked; None: they were."""

    bytes_per_s: float
    refusal: str | None


def measure_bus(context: DeviceContext, expert_bytes: int = 4 << 20) -> Bus:
    """With nothing else going on. Raises DeviceError."""
    bench = _Bench(context, expert_bytes, expert_bytes)
    bench.copy()
    copied, start = 0, time.perf_counter()
    while (seconds := time.perf_counter() - start) < _SECONDS:
        copied += bench.copy()
    return Bus(copied / seconds, bench.refusal)


def measure_contended(
    context: DeviceContext, layout: ExpertLayout, reference: TorchFfn
) -> Contended:
    """One expert after another by the CPU, for one token, beside copies. Raises DeviceError."""
    bench = _Bench(context, layout.slot_bytes, layout.data_bytes)
    math, slots = SlotMath(layout, bench.pool, reference), bench.pool.slots
    x = torch.ones(1, layout.hidden).to(torch.float32 if layout.dtype == "F32" else torch.bfloat16)
    rows = x.new_zeros(1, layout.hidden)
    ended = threading.Event()

    def copy() -> float:
        start, copied = time.perf_counter(), bench.copy()
        while not ended.is_set():
            copied += bench.copy()
        return copied / (time.perf_counter() - start)

    bench.copy()
    math.run(x, [(0, [0])], 1, rows)
    with ThreadPoolExecutor(1) as beside:
        copying = beside.submit(copy)
        try:
            computed, start = 0, time.perf_counter()
            while (seconds := time.perf_counter() - start) < _SECONDS:
                math.run(x, [(computed % slots, [0])], 1, rows)
                computed += 1
        finally:
            ended.set()
    return Contended(copying.result(), computed * layout.data_bytes / seconds)
