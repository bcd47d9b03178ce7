"""The threads of each pass: torch's, and those of the native kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from moeinf.native import set_compute_threads
from moeinf.offload.store.compute import MOST_ROWS
from moeinf.runtime.engine.thread_tuner import ThreadTuner


class ComputeThreads:
    """Sets the threads of the process for the passes of one engine.

    Torch gets one thread where the native kernels compute, for few rows: its threads would spin
    beside theirs. In float32 torch does all the work. No number changes a result.
    """

    def __init__(
        self,
        count: int,
        in_torch: bool,
        tuned: bool,
        waited: Callable[[], float],
        warming: Callable[[], bool],
    ) -> None:
        """Give `count` threads to prompts.

        in_torch: torch computes everything, so passes of few rows get `count` too. tuned: choose
        their number while the engine runs. waited: the seconds that passes waited for experts.
        warming: True while experts are read for later passes, which takes cores from this one.
        """
        self._count, self._in_torch = count, in_torch
        self._waited, self._warming = waited, warming
        self._native = count  # threads of the kernels now
        self._tuner = ThreadTuner(count) if tuned and not in_torch and count > 1 else None

    @property
    def decoding(self) -> int:
        """The number with which single rows are computed, trials aside."""
        return self._count if self._tuner is None else self._tuner.chosen

    @contextmanager
    def of(self, rows: int) -> Iterator[None]:
        """Set the threads for a pass of so many rows, which the block computes."""
        few = rows <= MOST_ROWS and not self._in_torch
        torchs = 1 if few else self._count
        if torch.get_num_threads() != torchs:
            torch.set_num_threads(torchs)
        if self._tuner is None:
            yield
            return
        self._kernels(self._tuner.threads if rows == 1 else self.decoding if few else self._count)
        waited, begin = self._waited(), time.perf_counter()
        yield
        if rows == 1 and self._waited() == waited and not self._warming():
            self._tuner.took(time.perf_counter() - begin)

    def _kernels(self, threads: int) -> None:
        if threads != self._native:
            set_compute_threads(threads)
            self._native = threads
