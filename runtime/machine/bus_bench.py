"""Measure how fast experts cross the bus and how fast the CPU computes them.

Both figures are in bytes per second, for experts of one format. Contended figures are measured at
the same time. Copies and CPU kernels then read the same memory, like in a layer that splits its
misses between them.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from moeinf.native import DeviceContext, DeviceError, DeviceSlots, HostLock, SlotPool
from moeinf.offload.format.layout import ExpertLayout
from moeinf.offload.gpu_tier.miss_split import Contended
from moeinf.offload.store.compute import SlotMath, TorchFfn
from moeinf.runtime.machine.memory import available_bytes, cache_bytes

_LEAST_BYTES = 64 << 20
_CACHES = 2  # the pool is this many times the size of all caches, so each round misses them
_SECONDS = 0.25
_MOST_IN_BATCH = 4
_PATTERN = 0x11  # a small normal bf16, f16 or f32: zeros and denormals have other speeds


class _Bench:
    """A pool full of experts, page-locked if the system allows it, and device slots to copy to."""

    def __init__(
        self, context: DeviceContext, slot_bytes: int, data_bytes: int, slots: int
    ) -> None:
        """Fill the pool and lock it.

        slots: the maximum number of device slots; at least two are used.
        """
        self._count = max(1, min(_MOST_IN_BATCH, slots // 2))  # experts per batch
        size = max(_LEAST_BYTES, min(_CACHES * cache_bytes(), available_bytes() // 4))
        self.pool = SlotPool(max(2 * self._count, size // slot_bytes), slot_bytes)
        arena = torch.frombuffer(self.pool, dtype=torch.uint8)
        arena.fill_(_PATTERN)
        lock = HostLock(context, self.pool, self.pool.bytes)
        self.refusal: str | None = None
        try:
            lock.lock_next()
        except DeviceError as error:  # as in some containers; an engine's lock will fail, too
            self.refusal = str(error)
        self._slots = DeviceSlots(context, lock, 2 * self._count, 0)
        self._bytes = data_bytes
        self._batches = self._flying = 0

    def copy(self) -> int:
        """Queue a batch, wait for the previous one, return the bytes. The bus is never idle."""
        begin, half = self._batches * self._count, self._batches % 2 * self._count
        chosen = [(begin + i) % self.pool.slots for i in range(self._count)]
        before = self._flying
        self._flying = self._slots.copy(chosen, list(range(half, half + self._count)), self._bytes)
        self._batches += 1
        if before:
            self._slots.wait(before)
        return self._count * self._bytes


class Bus(NamedTuple):
    """The bus speed from host slots. refusal: why they could not be page-locked, or None."""

    bytes_per_s: float
    refusal: str | None


def measure_bus(context: DeviceContext, expert_bytes: int = 4 << 20) -> Bus:
    """Measure the bus while nothing else runs. Raises DeviceError."""
    bench = _Bench(context, expert_bytes, expert_bytes, 2 * _MOST_IN_BATCH)
    bench.copy()
    copied, start = 0, time.perf_counter()
    while (seconds := time.perf_counter() - start) < _SECONDS:
        copied += bench.copy()
    return Bus(copied / seconds, bench.refusal)


def measure_contended(
    context: DeviceContext,
    layout: ExpertLayout,
    reference: TorchFfn,
    slots: int = 2 * _MOST_IN_BATCH,
) -> Contended:
    """Measure copies and the CPU at once, one expert and one token at a time. Raises DeviceError.

    slots: the number of slots that the device has room for.
    """
    bench = _Bench(context, layout.slot_bytes, layout.data_bytes, slots)
    math, held = SlotMath(layout, bench.pool, reference), bench.pool.slots
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
                math.run(x, [(computed % held, [0])], 1, rows)
                computed += 1
        finally:
            ended.set()
    return Contended(copying.result(), computed * layout.data_bytes / seconds)
