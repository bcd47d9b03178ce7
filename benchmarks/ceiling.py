"""How fast this machine reads memory right now: the bandwidth that floors are computed with.

Does not know models. Six loops, all numpy: the maximum of float32 on one thread and on all of them,
and the or of int64 on all of them, each over ordinary and over huge pages. The best one counts.
"""

from __future__ import annotations

import mmap
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BYTES = 256 << 20  # far above any cache


class ReadCeiling:
    """Holds the memory that is read; each call is one measurement of the given number of passes."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads)
        self._threads = threads
        self._arrays = [_array(huge=False), _array(huge=True)]
        self.bytes_per_s(1)  # the pages are there from now on

    def bytes_per_s(self, passes: int = 2) -> float:
        """The best of the six loops, each `passes` times."""
        best = 0.0
        for array in self._arrays:
            loops = [(np.max, array, 1), (np.max, array, self._threads)]
            loops += [(np.bitwise_or.reduce, array.view(np.int64), self._threads)]
            for loop, data, threads in loops:
                parts = np.array_split(data, threads)
                for _ in range(passes):
                    start = time.perf_counter()
                    list(self._pool.map(loop, parts))
                    best = max(best, _BYTES / (time.perf_counter() - start))
        return best


def _array(huge: bool) -> NDArray[Any]:
    memory = mmap.mmap(-1, _BYTES)
    memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    array = np.frombuffer(memory, np.float32)
    array[:] = 1
    return array
