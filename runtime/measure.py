"""Measures what a plan needs to know: how fast RAM and the model's disk can be read, right now.

Does not know plans. Takes well under a second, so a figure is an indication, not a benchmark.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moeinf.native import SlotPool
from moeinf.offload.transfer import Transfer
from moeinf.runtime.manifest import Manifest
from moeinf.runtime.memory import core_count

_RAM_BYTES = 128 << 20  # far above any cache
_DISK_BYTES = 64 << 20
_READERS = 8


@dataclass(frozen=True)
class Speeds:
    """Bytes per second of each tier, and how each figure came about."""

    ram_bytes_per_s: float
    disk_bytes_per_s: float
    ram_provenance: str
    disk_provenance: str


def measure(folder: Path, manifest: Manifest) -> Speeds:
    """RAM by reading a large array on every core; disk by reading some of the model's shards."""
    ram, cores = _ram()
    disk, size, direct = _disk(folder, manifest)
    how = "past the page cache" if direct else "through the page cache, so perhaps too high"
    return Speeds(
        ram,
        disk,
        f"measured now: maximum over {_RAM_BYTES >> 20} MiB on {cores} threads, best of 3",
        f"measured now: {size} bytes of expert shards, {_READERS} reads in flight, {how}",
    )


def _ram() -> tuple[float, int]:
    cores = core_count()
    parts = np.array_split(np.ones(_RAM_BYTES // 4, np.float32), cores)
    best = 0.0
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(3):
            start = time.perf_counter()
            list(pool.map(np.max, parts))
            best = max(best, _RAM_BYTES / (time.perf_counter() - start))
    return best, cores


def _disk(folder: Path, manifest: Manifest) -> tuple[float, int, bool]:
    shards = manifest.shards()
    slot_bytes = manifest.slots.slot_bytes
    count = max(1, min(len(shards), _DISK_BYTES // slot_bytes))
    chosen = shards[:: max(1, len(shards) // count)][:count]
    pool = SlotPool(min(_READERS, count), slot_bytes)
    transfer = Transfer(folder, chosen, pool, readers=pool.slots, direct_io=True)
    try:
        start = time.perf_counter()
        for first in range(0, count, pool.slots):
            wave = list(range(first, min(count, first + pool.slots)))
            tickets = transfer.demand(wave, list(range(len(wave))))
            for ticket, number in zip(tickets, wave, strict=True):
                transfer.wait(ticket, number)
        seconds = time.perf_counter() - start
        size = sum(shard.data_bytes for shard in chosen)
        return size / seconds, size, transfer.direct_io
    finally:
        transfer.close()
