"""Measure how fast RAM and drive are while the other of the two is read.

Where a drive's reads cost time of the same cores (a virtual drive, whose host copies), or its bytes
take from RAM's speed, a token that needs both cannot have the speeds that each has alone.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from moeinf.native import PAGE_BYTES, SlotPool, read_bandwidth
from moeinf.runtime.jobs.bench import read_ceiling
from moeinf.runtime.machine.disk_bench import WHOLE_BLOCKS, FileRange, drop_from_cache, read_once

_RAM_BYTES, _RAM_ROUNDS = 256 << 20, 100  # some seconds; the best round counts
_ALONE_ROUNDS = 4


@dataclass(frozen=True)
class AtOnce:
    """Bytes per second of RAM and drive: each one alone, and while the other is read."""

    ram_alone: float
    drive_alone: float
    ram: float
    drive: float

    def seconds(self, ram_bytes: float, drive_bytes: float) -> float:
        """Return the least time for both: at once, and what is left of one of them alone."""
        both = min(ram_bytes / self.ram, drive_bytes / self.drive)
        left = (ram_bytes - both * self.ram) / self.ram_alone
        return both + max(left, (drive_bytes - both * self.drive) / self.drive_alone)


def measure_at_once(pieces: Sequence[FileRange], threads: int, in_flight: int) -> AtOnce:
    """Read the pieces in random order with `in_flight` threads, and RAM with `threads`.

    Past the page cache, where the file system can. Raises OSError, and Unsupported where the system
    cannot read so.
    """
    arena = SlotPool(2 * in_flight, max(piece.size_bytes for piece in pieces))
    memoryview(arena).cast("B")[::PAGE_BYTES] = bytes(arena.bytes // PAGE_BYTES)  # touch each page
    ended = threading.Event()

    def drive() -> float:
        speed = read_once(pieces, arena, in_flight, True, WHOLE_BLOCKS)
        if speed is None:  # refused
            drop_from_cache(pieces)
            speed = read_once(pieces, arena, in_flight, False, WHOLE_BLOCKS)
        assert speed is not None
        return speed

    def all_the_time() -> list[float]:
        speeds = []
        while not ended.is_set():
            speeds.append(drive())
        return speeds

    alone = max(drive() for _ in range(_ALONE_ROUNDS))
    ceiling = read_ceiling(threads)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(all_the_time)
        try:
            ram = read_bandwidth(_RAM_BYTES, threads, True, True, _RAM_ROUNDS)
        finally:
            ended.set()
        speeds = reading.result()
    # The first pass has run while the RAM to be read was allocated.
    return AtOnce(ceiling, alone, ram, statistics.median(speeds[1:-1] or speeds))
