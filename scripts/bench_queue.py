"""Compare the copy queue with the drive: random expert-sized reads, floor and ceiling in one run.

Run: python scripts/bench_queue.py [--folder .] [--megabytes 4] [--experts 128] [--rounds 7]
Floor: one preadv after the other. Ceiling: the best cell of the sweep of `moeinf devices`, measured
again in every round. The sweep uses plain threads and preadv, with 1 to 32 direct or buffered reads
in flight. The queue reads with the settings that the sweep chose, with and without each expert's
checksum.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

from moeinf.native import SlotPool, crc32c
from moeinf.offload.format.shards import FileRecord
from moeinf.offload.store.transfer import Transfer
from moeinf.runtime.machine.disk_bench import (
    IN_FLIGHT,
    WHOLE_BLOCKS,
    FileRange,
    Reading,
    drop_from_cache,
    read_once,
    sweep,
    written_files,
)

_SLOTS = 32


def queue_speed(pieces: list[FileRange], crcs: list[int] | None, reading: Reading) -> float:
    """Return bytes per second of demanding every expert once, in random order, over 32 slots."""
    records = [
        FileRecord(p.path.name, p.size_bytes, "", None if crcs is None else crcs[i])
        for i, p in enumerate(pieces)
    ]
    pool = SlotPool(_SLOTS, pieces[0].size_bytes)
    memoryview(pool).cast("B")[::4096] = bytes(pool.bytes // 4096)  # no page faults in the reads
    transfer = Transfer(
        pieces[0].path.parent,
        records,
        pool,
        readers=reading.readers,
        direct_io=reading.direct,
        block_bytes=reading.block_bytes,
    )
    order = random.sample(range(len(pieces)), len(pieces))
    if not reading.direct:
        drop_from_cache(pieces)
    start = time.perf_counter()
    first = transfer.demand(order[:_SLOTS], range(_SLOTS))
    running = [(t, cell, slot) for slot, (t, cell) in enumerate(zip(first, order, strict=False))]
    for cell in order[_SLOTS:] + [-1] * len(first):
        ticket, arrived, slot = running.pop(0)
        transfer.wait(ticket, arrived)
        if cell >= 0:
            running.append((transfer.demand([cell], [slot])[0], cell, slot))
    seconds = time.perf_counter() - start
    transfer.close()
    return sum(piece.size_bytes for piece in pieces) / seconds


def nobody(*_: int) -> None:
    """Ignore progress."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--megabytes", type=float, default=4)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    o = parser.parse_args()
    size = int(o.megabytes * 2**20) // 4096 * 4096
    with (
        tempfile.TemporaryDirectory(dir=o.folder) as place,
        written_files(Path(place), size, o.experts, nobody) as pieces,
    ):
        crcs = [crc32c(piece.path.read_bytes()) for piece in pieces]
        reading = sweep(pieces, nobody).chosen
        print(f"reading: {reading}")
        arena = SlotPool(max(IN_FLIGHT), size)
        ratios: dict[str, list[float]] = {"unchecked": [], "checked": []}
        for _ in range(o.rounds):
            cells = {}
            for count in IN_FLIGHT:
                for direct in (True, False):
                    if not direct:
                        drop_from_cache(pieces)
                    speed = read_once(pieces, arena, count, direct, WHOLE_BLOCKS)
                    cells[count, direct] = speed or 0.0
            (count, direct), ceiling = max(cells.items(), key=lambda cell: cell[1])
            speeds = {
                "unchecked": queue_speed(pieces, None, reading),
                "checked": queue_speed(pieces, crcs, reading),
            }
            for name, speed in speeds.items():
                ratios[name].append(speed / ceiling)
            way = "direct" if direct else "buffered"
            print(
                f"floor {max(cells[1, True], cells[1, False]) / 1e9:.2f} GB/s, ceiling "
                f"{ceiling / 1e9:.2f} ({count} {way}), queue {speeds['unchecked'] / 1e9:.2f}, "
                f"with checksum {speeds['checked'] / 1e9:.2f}"
            )
    for name, values in ratios.items():
        print(f"queue {name} / ceiling: median {statistics.median(values):.3f} of {o.rounds}")


if __name__ == "__main__":
    main()
