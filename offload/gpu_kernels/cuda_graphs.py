"""CUDA graphs: work that is queued again and again, written down once and queued in one call.

Does not know what the work is. Imported only where torch has CUDA.

What a graph allocates lies in a pool from which torch gives memory away again as if the graph had
run and were over. So graphs of one pool may be played only one after the other as they were
written, none of them between two others that hand something on. `apart` is a pool of its own, for
graphs that come in between and hand on nothing but what lies outside.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import torch

_LEAST_TORCH = "2.13"  # before, a graph that breaks off leaves torch's memory in a wrong state


class CudaGraphs:
    """Graphs of one device. What they read from outside, and leave there, its owner keeps alive."""

    one_at_a_time: ClassVar = threading.RLock()  # of the process: torch writes down but one graph

    def __init__(self, place: torch.device, alone: Callable[[], bool]) -> None:
        """alone: whether nobody else of this process computes there; whoever comes holds
        `one_at_a_time` for that."""
        self._place, self._alone = place, alone
        # Nothing can be written down on the default one.
        self._stream = torch.cuda.Stream(place)  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._pools: dict[bool, tuple[Any, torch.cuda.CUDAGraph]] = {}

    @property
    def can_begin(self) -> bool:
        """Whether nobody else computes there now."""
        return self._alone()

    @contextmanager
    def aside(self, warm_up: Callable[[], object]) -> Iterator[None]:
        """Within, work is queued on a stream of its own, and `begin` and `end` may be called.

        warm_up: the work itself, because to compile or load a kernel cannot be written down. Work
        that was queued before runs first; what is queued afterwards waits. Raises RuntimeError,
        also where others compute there: torch has one scratch of cuBLAS for all, which is
        forgotten here, and gives nobody cached memory back meanwhile.
        """
        if torch.__version__ < _LEAST_TORCH:  # a version, not a text
            raise RuntimeError(f"they need torch {_LEAST_TORCH}, and this is {torch.__version__}")
        outside = torch.cuda.current_stream(self._place)
        with self.one_at_a_time, _no_collection():
            if not self._alone():
                raise RuntimeError("another model computes on this GPU")
            self._stream.wait_stream(outside)
            try:
                with torch.cuda.stream(self._stream):
                    warm_up()
                    _forget_scratch()  # cuBLAS takes its own within the graphs, where it stays
                    for apart in (False, True):
                        self._open(apart)
                    try:
                        yield
                    finally:
                        self._abandon()
            finally:
                outside.wait_stream(self._stream)
                _forget_scratch()

    def begin(self, apart: bool = False) -> None:
        """From here on this thread's work is written down, and does not run."""
        graph = torch.cuda.CUDAGraph()
        # Other threads go on: page-locking, say.
        graph.capture_begin(pool=self._pools[apart][0], capture_error_mode="thread_local")
        self._graph = graph

    def end(self) -> Callable[[], None] | None:
        """What queues it all, each time on the stream that is current then; None: it is nothing."""
        graph, self._graph = self._graph, None
        assert graph is not None
        return None if _ended_empty(graph) else graph.replay

    def forget(self) -> None:
        """Gives back what graphs that are gone have had. There will be no others."""
        self._pools.clear()
        with self.one_at_a_time:
            torch.cuda.empty_cache()

    def _open(self, apart: bool) -> None:
        """A pool lasts as long as a graph of it: an empty one, which is never played."""
        if apart not in self._pools:
            handle, graph = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
            graph.capture_begin(pool=handle, capture_error_mode="thread_local")
            _ended_empty(graph)
            self._pools[apart] = handle, graph

    def _abandon(self) -> None:
        """Ends what an error has cut off."""
        graph, self._graph = self._graph, None
        if graph is not None:
            with suppress(RuntimeError):  # that it was cut off
                _ended_empty(graph)


def _ended_empty(graph: torch.cuda.CUDAGraph) -> bool:
    """Ends the writing. Whether there was nothing to write, which torch tells by a warning."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        graph.capture_end()
    return any("empty" in str(warning.message) for warning in told)


def _forget_scratch() -> None:
    """Gives back what cuBLAS keeps per stream, and what torch keeps for later: while work is
    written down torch can free nothing. torch's own graphs do so (_inductor/cudagraph_trees.py)."""
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Nothing of a device may be destroyed while work is written down."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
