"""The first token of a model that is not in memory: the page cache is emptied, a worker started.

Does not know how models are made. What a start must do at least is read the bytes that it needs
once; how long that takes is measured right after, from the same files, cold again.
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
    """Drops a file, or all files below a folder, from the page cache."""
    for file in files_of(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)  # what is not yet written cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def start_cold(path: Path, command: Sequence[str], prompt: list[int]) -> tuple[Result, Result]:
    """Times of a cold start in seconds, and what the worker says about itself afterwards."""
    forget_pages(path)
    with Worker(command) as worker:
        answer = worker.ask("prefill", prompt)
        about = worker.ask("about")
    imported, ready = worker.greeting["imported_at"], worker.greeting["ready_at"]
    return {
        "imports": imported - worker.started_at,
        "load": ready - imported,
        "prefill": answer["seconds"],
        "first_token": answer["at"] - imported,  # imports are not in it
    }, about


def read_once(folder: Path, manifest: Manifest, experts: int, readers: int) -> float:
    """Seconds to read the dense weights and so many shards, cold, in the better of two ways."""
    shards = manifest.shards()
    paths = [DENSE, *(s.path for s in shards[:: max(1, len(shards) // max(1, experts))][:experts])]
    return min(_read([folder / path for path in paths], readers, flag) for flag in (0, os.O_DIRECT))


def _read(paths: Sequence[Path], readers: int, flag: int) -> float:
    """All of the files into memory that is used over and over: nothing but the reads counts."""
    for path in paths:
        forget_pages(path)
    jobs = [
        (path, at) for path in paths for at in range(0, path.stat().st_size, _BLOCK_BYTES)
    ]  # offsets are whole pages, as O_DIRECT wants them
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
    """Each time's median over several starts."""
    found = [measure() for _ in range(rounds)]
    return {key: round(statistics.median(one[key] for one in found), 4) for key in found[0]}
