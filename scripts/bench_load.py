"""Measure the cost of every load's checksum: read experts with O_DIRECT, with it and without.

Run: python scripts/bench_load.py [--folder .] [--megabytes 12.6] [--experts 160] [--readers 4]
Writes shards of random bytes, then reads all of them in waves, alternating. Prints the speed of
both and the median ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from msgspec.structs import replace

from moeinf.native import SlotPool
from moeinf.offload.format.shards import FileRecord, write_file
from moeinf.offload.store.transfer import Transfer

_SLOTS = 16


def read_all(folder: Path, records: list[FileRecord], readers: int) -> float:
    """Return the seconds to read every shard once, with O_DIRECT where the disk allows it."""
    pool = SlotPool(_SLOTS, records[0].data_bytes)
    transfer = Transfer(folder, records, pool, readers=readers, direct_io=True)
    start = time.perf_counter()
    for first in range(0, len(records), _SLOTS):
        wave = list(range(first, min(first + _SLOTS, len(records))))
        for ticket, cell in zip(transfer.demand(wave, range(len(wave))), wave, strict=True):
            transfer.wait(ticket, cell)
    seconds = time.perf_counter() - start
    transfer.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--megabytes", type=float, default=12.6)
    parser.add_argument("--experts", type=int, default=160)
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    o = parser.parse_args()
    size = int(o.megabytes * 1e6) // 4096 * 4096
    with tempfile.TemporaryDirectory(dir=o.folder) as place:
        folder = Path(place)
        data = memoryview(os.urandom(size))
        header = bytes(4096)
        checked = [write_file(folder, f"{i}.bin", header, [data]) for i in range(o.experts)]
        plain = [replace(record, crc32c=None) for record in checked]
        os.sync()
        ratios = []
        for n in range(o.rounds + 1):
            order = ((plain, checked), (checked, plain))[n % 2]  # neither always goes first
            seconds = [read_all(folder, records, o.readers) for records in order]
            without, with_it = seconds if order[0] is plain else reversed(seconds)
            if n == 0:
                continue  # the first round finds the drive and the allocator cold
            ratios.append(with_it / without)
            rate = size * o.experts / 1e9
            print(f"without {rate / without:.2f} GB/s, with {rate / with_it:.2f} GB/s")
        print(f"median ratio {statistics.median(ratios):.3f} over {o.rounds} rounds")


if __name__ == "__main__":
    main()
