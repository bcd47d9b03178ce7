"""The first token of a model that is not in memory: empty the page cache, start a worker.

A start must at least read its bytes once. That time is measured right after the start, from the
same files, cold again.
"""

from __future__ import annotations

import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.models import files_of
from benchmarks.worker import Worker
from moeinf.runtime.library.manifest import DENSE, Manifest

_BLOCK_BYTES = 4 << 20
Result = dict[str, Any]


def forget_pages(path: Path) -> None:
    """Drop a file, or all files below a folder, from the page cache."""
    for file in files_of(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)  # dirty pages cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def start_cold(path: Path, command: Sequence[str], prompt: list[int]) -> tuple[Result, Result]:
    """Return the times of a cold start in seconds, and the worker's answer to "about"."""
    forget_pages(path)
    with Worker(command) as worker:
        answer = worker.ask("prefill", prompt)
        about = worker.ask("about")
    imported, ready = worker.greeting["imported_at"], worker.greeting["ready_at"]
    return {
        "imports": imported - worker.started_at,
        "load": ready - imported,
        "prefill": answer["seconds"],
        "first_token": answer["at"] - imported,  # without the imports
    }, about


def read_once(folder: Path, manifest: Manifest, experts: int, readers: int) -> float:
    """Return the seconds to read dense weights and `experts` shards, cold, in the faster way."""
    shards = manifest.shards()
    paths = [DENSE, *(s.path for s in shards[:: max(1, len(shards) // max(1, experts))][:experts])]
    return min(_read([folder / path for path in paths], readers, flag) for flag in (0, os.O_DIRECT))


def _read(paths: Sequence[Path], readers: int, flag: int) -> float:
    """Read all files into reused memory, so that only the reads count; return the seconds."""
    for path in paths:
        forget_pages(path)
    jobs = [
        (path, at) for path in paths for at in range(0, path.stat().st_size, _BLOCK_BYTES)
    ]  # offsets are whole pages for O_DIRECT
    buffers = threading.local()

    def read(job: tuple[Path, int]) -> None:
        if not hasattr(buffers, "block"):
            buffers.block = mmap.mmap(-1, _BLOCK_BYTES)
        descriptor = os.open(job[0], os.O_RDONLY | flag)
        try:
            os.preadv(descriptor, [buffers.block], job[1])
        finally:
            os.close(descriptor)

    with ThreadPoolExecutor(readers) as pool:
        start = time.perf_counter()
        list(pool.map(read, jobs))
        return time.perf_counter() - start


def median_of(rounds: int, measure: Callable[[], Result]) -> Result:
    """Return the median of each time over several starts."""
    found = [measure() for _ in range(rounds)]
    return {key: round(statistics.median(one[key] for one in found), 4) for key in found[0]}
