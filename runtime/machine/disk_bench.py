"""Measure one drive: random reads of expert size, 1 to 32 in flight, with and without O_DIRECT.

It uses plain threads and preadv, so that the copy queue can be compared with these figures. The
data is on the drive (written and synced before) and, if the system allows it, not in the page
cache. Caches below that, of the drive or a hypervisor, are invisible here.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from msgspec import Meta

from moeinf.native import MAX_READERS, PAGE_BYTES, SlotPool
from moeinf.runtime.files.atomic import make_folder_durably, write_all
from moeinf.runtime.files.regular import open_regular
from moeinf.runtime.system import drop_cached, read_at

IN_FLIGHT = (1, 2, 4, 8, 16, 32)
GOOD_ENOUGH = 0.95  # of the best; within it fewer threads and larger blocks are preferred
WHOLE_BLOCKS = 1 << 30  # an expert in one system call
_BLOCKS = (WHOLE_BLOCKS, 1 << 20, 256 << 10)
_BUFFERED_GAIN = 2.0  # reads through the page cache must be so many times as fast as O_DIRECT
_LEAST_READERS = 4
_PROBES = 64
_CACHED_SHARE = 0.05  # of the probed pages; above it buffered figures include the page cache
_O_DIRECT = getattr(os, "O_DIRECT", 0)

T = TypeVar("T")
Progress = Callable[[int, int], None]  # (bytes done, total bytes)


@dataclass(frozen=True)
class FileRange:
    """The place of one piece of expert size; offset is a multiple of a page."""

    path: Path
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class Reading:
    """The chosen way to read a drive.

    readers: threads of a queue. block_bytes: bytes per system call. direct: O_DIRECT. in_flight:
    reads at once that keep the drive busy.
    """

    readers: Annotated[int, Meta(ge=1, le=MAX_READERS)]
    block_bytes: Annotated[int, Meta(gt=0, le=WHOLE_BLOCKS, multiple_of=PAGE_BYTES)]
    direct: bool
    bytes_per_s: Annotated[float, Meta(gt=0)]
    in_flight: Annotated[int, Meta(ge=1)]


@dataclass(frozen=True)
class Sweep:
    """Bytes per second by reads in flight; empty for a way of reading that the drive refuses."""

    direct: dict[int, float]
    buffered: dict[int, float]
    blocks: dict[int, float]  # by block size, read as `chosen` does
    chosen: Reading
    notes: tuple[str, ...]


def sweep(
    pieces: Sequence[FileRange],
    progress: Progress,
    in_flight: Sequence[int] = IN_FLIGHT,
    rounds: int = 2,
    blocks: Sequence[int] = _BLOCKS,
) -> Sweep:
    """Read all pieces in random order, once per cell and round; the fastest round counts.

    Raises OSError for files that cannot be read.
    """
    size = max(piece.size_bytes for piece in pieces)
    total = sum(piece.size_bytes for piece in pieces)
    arena = SlotPool(max(in_flight), size)
    memoryview(arena).cast("B")[::PAGE_BYTES] = bytes(arena.bytes // PAGE_BYTES)  # touch each page
    done, cells = 0, rounds * (2 * len(in_flight) + sum(b != WHOLE_BLOCKS for b in blocks))
    found: dict[bool, dict[int, float]] = {True: {}, False: {}}
    by_block: dict[int, float] = {}

    def read(direct: bool, count: int, block: int) -> float | None:
        nonlocal done
        speed = read_once(pieces, arena, count, direct, block)
        done += total
        progress(done, cells * total)
        return speed

    uncached = True
    for _ in range(rounds):  # alternate, so that a slow moment affects one round only
        for count in in_flight:
            for direct in (True, False):
                uncached &= direct or drop_from_cache(pieces)
                speed = read(direct, count, WHOLE_BLOCKS)
                if speed is not None:
                    found[direct][count] = max(speed, found[direct].get(count, 0.0))
    chosen = _choose(found[True], found[False])
    by_block[WHOLE_BLOCKS] = chosen.bytes_per_s
    for _ in range(rounds):
        for block in blocks:
            if block == WHOLE_BLOCKS:
                continue
            if not chosen.direct:
                drop_from_cache(pieces)
            speed = read(chosen.direct, chosen.readers, block) or 0.0
            by_block[block] = max(speed, by_block.get(block, 0.0))
    block, speed = _first_good(sorted(by_block.items(), reverse=True))
    progress(cells * total, cells * total)
    notes = []
    if not found[True]:
        notes.append("the file system refuses O_DIRECT: reads go through the page cache")
    if not uncached:
        notes.append("the page cache could not be kept out: buffered figures are too high")
    # A reader leaves the drive idle while it computes a checksum, and a quarter of the readers is
    # reserved for demand reads. So there are more readers than the drive needs reads in flight.
    readers = min(MAX_READERS, max(_LEAST_READERS, chosen.in_flight * 5 // 4))
    chosen = Reading(readers, block, chosen.direct, speed, chosen.in_flight)
    return Sweep(found[True], found[False], by_block, chosen, tuple(notes))


def _choose(direct: dict[int, float], buffered: dict[int, float]) -> Reading:
    """Choose the fewest reads in flight that are nearly as fast as the best, with O_DIRECT or not.

    Under a memory limit reads through the page cache push out each other's pages, and one pass in
    a busy moment proves no small difference. So they must be much faster.
    """
    is_direct = _BUFFERED_GAIN * max(direct.values(), default=0.0) > max(buffered.values())
    readers, speed = _first_good(sorted((direct if is_direct else buffered).items()))
    return Reading(readers, WHOLE_BLOCKS, is_direct, speed, readers)


def _first_good(cells: Sequence[tuple[T, float]]) -> tuple[T, float]:
    least = GOOD_ENOUGH * max(speed for _, speed in cells)
    return next(cell for cell in cells if cell[1] >= least)


def read_once(
    pieces: Sequence[FileRange], arena: SlotPool, in_flight: int, direct: bool, block_bytes: int
) -> float | None:
    """Read every piece once in random order; return bytes per second, or None without O_DIRECT."""
    with _opened(pieces, direct) as files:
        if files is None:
            return None
        order = list(range(len(pieces)))
        random.shuffle(order)
        view = memoryview(arena).cast("B")

        def work(worker: int) -> int:
            count = 0
            # Each read goes to another slot, as in a cache. Some virtual drives deliver a fifth
            # faster into a slot that is still in the CPU's cache.
            for slot in itertools.cycle(range(worker, arena.slots, workers)):
                place = view[slot * arena.slot_bytes : (slot + 1) * arena.slot_bytes]
                try:
                    index = order.pop()  # popped by any thread, one at a time
                except IndexError:
                    return count
                piece = pieces[index]
                _read_piece(files[piece.path], piece, place, block_bytes)
                count += piece.size_bytes
            return count

        workers = min(in_flight, len(pieces), arena.slots)
        with ThreadPoolExecutor(workers) as threads:
            list(threads.map(_nothing, range(workers)))  # start all threads before the clock
            start = time.perf_counter()
            try:
                size = sum(threads.map(work, range(workers)))
            except OSError as error:
                if direct and error.errno == errno.EINVAL:  # at the first read
                    return None
                raise
            return size / (time.perf_counter() - start)


def _nothing(_: int) -> None:
    time.sleep(0.001)


def _read_piece(file: int, piece: FileRange, place: memoryview, block_bytes: int) -> None:
    got, whole = 0, -(-piece.size_bytes // PAGE_BYTES) * PAGE_BYTES
    while got < piece.size_bytes:
        end = min(whole, got + block_bytes)
        count = read_at(file, place[got:end], piece.offset + got)
        if count == 0:
            raise OSError(errno.ENODATA, "the file ends early", str(piece.path))
        got += count


@contextmanager
def _opened(pieces: Sequence[FileRange], direct: bool) -> Iterator[dict[Path, int] | None]:
    with ExitStack() as opened:
        files: dict[Path, int] = {}
        try:
            for path in {piece.path for piece in pieces}:
                files[path] = open_regular(path, os.O_RDONLY | (_O_DIRECT if direct else 0))
                opened.callback(os.close, files[path])
        except OSError as error:
            if direct and error.errno == errno.EINVAL:
                yield None
                return
            raise
        yield files if _O_DIRECT or not direct else None


def drop_from_cache(pieces: Sequence[FileRange]) -> bool:
    """Drop the files' pages from the page cache; return False if too many are still there."""
    cached = probed = 0
    for number, path in enumerate(sorted({piece.path for piece in pieces})):
        file = open_regular(path)
        try:
            if not drop_cached(file):
                return False
            if number < _PROBES:
                probed += 1
                cached += _is_cached(file, pieces[0].offset)
                drop_cached(file)  # a probe may read ahead
        finally:
            os.close(file)
    return cached <= _CACHED_SHARE * probed


def _is_cached(file: int, offset: int) -> bool:
    """Return True if the page is cached; False where the system cannot tell."""
    with suppress(OSError, AttributeError):  # BlockingIOError: the page is not cached
        return os.preadv(file, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    return False


@contextmanager
def written_files(
    folders: Path | Sequence[Path], piece_bytes: int, count: int, progress: Progress
) -> Iterator[list[FileRange]]:
    """Write temporary files of random bytes, one piece each, synced and dropped from the cache.

    Several folders take turns. Raises OSError, for example ENOSPC. The files are deleted on exit.
    """
    size = -(-piece_bytes // PAGE_BYTES) * PAGE_BYTES
    source = random.Random(time.perf_counter_ns())
    with ExitStack() as made:
        pieces = []
        places = [folders] if isinstance(folders, Path) else folders
        for folder in places:
            make_folder_durably(folder.parent)  # the home; models may be for other users, too
            folder.mkdir(exist_ok=True)
        for number in range(count):
            path = places[number % len(places)] / f".devices-{os.getpid()}-{number}.partial"
            made.callback(path.unlink, missing_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                write_all(file, source.randbytes(size), path.parent)
                os.fsync(file)
                drop_cached(file)
            finally:
                os.close(file)
            pieces.append(FileRange(path, 0, size))
            progress((number + 1) * size, count * size)
        yield pieces
