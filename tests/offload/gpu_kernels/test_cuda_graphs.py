"""Test our calls of torch's CUDA graphs with a fake CUDA that computes nothing.

tests/runtime/test_real_gpu.py checks real graphs where there is a GPU: those of a decode step are
rehearsed and reproduce its bits.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from moeinf.offload.gpu_kernels.cuda_graphs import CudaGraphs


class Stream:
    def __init__(self, place: object) -> None:
        self.waits: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.waits.append(other)


class Graph:
    """A fake graph. `told`: the calls of all graphs, in order. `work`: True if there is work."""

    told: list[tuple[object, ...]]
    work = True

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.told.append(("begin", pool))

    def capture_end(self) -> None:
        self.told.append(("end",))
        if not Graph.work:
            warnings.warn("The CUDA Graph is empty.", stacklevel=2)

    def replay(self) -> None:
        self.told.append(("replay", self))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[object, ...]]]:
    """Give the list of calls of torch, in order."""
    Graph.told, handles = [], iter(range(99))

    def note(word: str) -> Any:
        return lambda *_: Graph.told.append((word,))

    @contextmanager
    def stream(_: object) -> Iterator[None]:
        yield

    outside = Stream(None)
    cuda = torch.cuda
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.13.0"))
    monkeypatch.setattr(cuda, "Stream", Stream)
    monkeypatch.setattr(cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(cuda, "current_stream", lambda _: outside)
    monkeypatch.setattr(cuda, "stream", stream)
    monkeypatch.setattr(cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(cuda, "empty_cache", note("empty cache"))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", note("scratch"), raising=False)
    yield Graph.told
    Graph.work = True


def made(alone: bool = True, any_torch: bool = False) -> CudaGraphs:
    return CudaGraphs(torch.device("cuda", 0), lambda: alone, any_torch)


def test_work_is_written_into_two_pools(told: list[tuple[object, ...]]) -> None:
    graphs = made()
    with graphs.aside(lambda: told.append(("warm",))):
        assert told[:3] == [("warm",), ("scratch",), ("empty cache",)]
        assert told[3:] == [("begin", 0), ("end",), ("begin", 1), ("end",)]  # per pool
        del told[:]
        graphs.begin()
        play = graphs.end()
        graphs.begin(apart=True)
        Graph.work = False
        assert graphs.end() is None
    assert told == [
        ("begin", 0), ("end",), ("begin", 1), ("end",), ("scratch",), ("empty cache",),
    ]  # fmt: skip
    assert play is not None
    play()
    assert told[-1][0] == "replay"
    with graphs.aside(lambda: None):
        del told[:]
        graphs.begin()
        graphs.end()
        assert told[0] == ("begin", 0)  # the same pool
    graphs.forget()
    assert told[-1] == ("empty cache",)
    with graphs.aside(lambda: None):
        assert ("begin", 2) in told  # a new pool


def test_an_error_ends_what_was_begun(told: list[tuple[object, ...]]) -> None:
    graphs = made()

    def breaks() -> None:
        graphs.begin()
        raise RuntimeError("a test's")

    with pytest.raises(RuntimeError, match="a test's"), graphs.aside(lambda: None):
        breaks()
    assert told[-4:] == [("begin", 0), ("end",), ("scratch",), ("empty cache",)]
    with graphs.aside(lambda: None):
        graphs.begin()
        assert graphs.end() is not None


def test_who_is_not_alone_writes_nothing(told: list[tuple[object, ...]]) -> None:
    graphs = made(alone=False)
    with pytest.raises(RuntimeError, match="another model"), graphs.aside(lambda: told.append(())):
        raise AssertionError
    assert told == []
    assert CudaGraphs.one_at_a_time.acquire(timeout=1)
    CudaGraphs.one_at_a_time.release()


def test_an_older_torch_writes_nothing(
    told: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.12.1+cu130"))
    words = r"they need torch 2\.13, and this is 2\.12\.1\+cu130"
    with pytest.raises(RuntimeError, match=words), made().aside(lambda: None):
        raise AssertionError
    assert told == []


def test_an_older_torch_writes_until_a_capture_fails(
    told: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed capture an older torch keeps memory, so its process captures no more."""
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.11.0+cu130"))
    monkeypatch.setattr(CudaGraphs, "_broken", False)
    graphs = made(any_torch=True)
    with graphs.aside(lambda: None):
        graphs.begin()
        assert graphs.end() is not None

    def breaks() -> None:
        graphs.begin()
        raise RuntimeError("a test's")

    with pytest.raises(RuntimeError, match="a test's"), graphs.aside(lambda: None):
        breaks()
    other = made(any_torch=True)
    with pytest.raises(RuntimeError, match="a capture failed"), other.aside(lambda: None):
        raise AssertionError


def test_one_writes_at_a_time(told: list[tuple[object, ...]]) -> None:
    first, second = made(), made()
    entered = threading.Event()

    def write() -> None:
        with second.aside(lambda: None):
            entered.set()

    with first.aside(lambda: None):
        other = threading.Thread(target=write)
        other.start()
        assert not entered.wait(0.1)
    assert entered.wait(10)
    other.join()
