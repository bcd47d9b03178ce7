"""Capture repeated GPU work as CUDA graphs and replay it in one call.

Imported only where torch has CUDA.

A graph allocates from a memory pool. After capture, torch reuses that memory as if the graph had
run and ended. So graphs of one pool must be replayed in the order of their capture. None may run
between two others of the pool when one of them passes data to the other. `apart` selects a second
pool. Its graphs may run in between, and pass data only through memory outside the pools.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import torch

_LEAST_TORCH = "2.13"  # earlier, an aborted capture leaves torch's allocator in a wrong state


class CudaGraphs:
    """Graphs of one device. The caller keeps alive the outside memory that they read and write."""

    one_at_a_time: ClassVar = threading.RLock()  # per process: torch captures one graph at a time
    _broken: ClassVar = False  # a capture failed in this process, with an older torch

    def __init__(
        self, place: torch.device, alone: Callable[[], bool], any_torch: bool = False
    ) -> None:
        """Make a stream for capture on `place`.

        alone: returns True if no other engine of this process computes on the device. A new engine
        must hold `one_at_a_time` while it registers. any_torch: capture with an older torch, too,
        until a capture fails.
        """
        self._place, self._alone, self._any_torch = place, alone, any_torch
        # The default stream does not support capture.
        self._stream = torch.cuda.Stream(place)  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._pools: dict[bool, tuple[Any, torch.cuda.CUDAGraph]] = {}

    @property
    def can_begin(self) -> bool:
        """True if no other engine of this process computes on the device now."""
        return self._alone()

    @contextmanager
    def aside(self, warm_up: Callable[[], object]) -> Iterator[None]:
        """Queue work on a separate stream; within, `begin` and `end` may be called.

        warm_up: the work itself, because compiling or loading a kernel cannot be captured. Work
        that was queued before runs first, and work that is queued afterwards waits.

        Raises RuntimeError if torch is too old, or if another model computes on the device. All
        models share torch's cuBLAS workspace, which is freed here. During capture torch returns no
        cached memory.
        """
        if self._broken:
            raise RuntimeError("a capture failed, and this torch cannot capture after that")
        if _is_older() and not self._any_torch:
            words = f"they need torch {_LEAST_TORCH}, and this is {torch.__version__}"
            raise RuntimeError(f"{words} (MOEINF_GRAPHS=1 tries them)")
        outside = torch.cuda.current_stream(self._place)
        with self.one_at_a_time, _no_collection():
            if not self._alone():
                raise RuntimeError("another model computes on this GPU")
            self._stream.wait_stream(outside)
            try:
                with torch.cuda.stream(self._stream):
                    warm_up()
                    _forget_scratch()  # within graphs cuBLAS allocates its own, in their pools
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
        """Start the capture of this thread's work, which is recorded and does not run."""
        graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile, for example to page-lock memory.
        graph.capture_begin(pool=self._pools[apart][0], capture_error_mode="thread_local")
        self._graph = graph

    def end(self) -> Callable[[], None] | None:
        """End the capture and return its replay; None: no work was captured.

        Each call of the replay queues the work on the stream that is current then.
        """
        graph, self._graph = self._graph, None
        assert graph is not None
        return None if _ended_empty(graph) else graph.replay

    def forget(self) -> None:
        """Free the memory of deleted graphs. No graph may be captured afterwards."""
        self._pools.clear()
        with self.one_at_a_time:
            torch.cuda.empty_cache()

    def _open(self, apart: bool) -> None:
        """Make a pool and keep it alive by an empty graph, which is never replayed."""
        if apart not in self._pools:
            handle, graph = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
            graph.capture_begin(pool=handle, capture_error_mode="thread_local")
            _ended_empty(graph)
            self._pools[apart] = handle, graph

    def _abandon(self) -> None:
        """End a capture that an error has interrupted."""
        graph, self._graph = self._graph, None
        if graph is not None:
            CudaGraphs._broken |= _is_older()
            with suppress(RuntimeError):  # the capture is invalid
                _ended_empty(graph)


def _is_older() -> bool:
    return bool(torch.__version__ < _LEAST_TORCH)  # TorchVersion compares as a version


def _ended_empty(graph: torch.cuda.CUDAGraph) -> bool:
    """End the capture and return True if it is empty, which torch reports by a warning."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        graph.capture_end()
    return any("empty" in str(warning.message) for warning in told)


def _forget_scratch() -> None:
    """Free cuBLAS's workspaces per stream and torch's cached memory.

    During capture torch can free nothing. torch's own graphs do the same
    (_inductor/cudagraph_trees.py).
    """
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection: no object of a device may be destroyed during capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
