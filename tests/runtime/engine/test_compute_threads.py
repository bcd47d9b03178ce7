"""The threads of each pass, with made-up times."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from moeinf.offload.store.compute import MOST_ROWS
from moeinf.runtime.engine import compute_threads
from moeinf.runtime.engine.compute_threads import ComputeThreads
from moeinf.runtime.generation.chat import Conversation
from moeinf.runtime.requests import Limits
from moeinf.runtime.sampling.sampler import SamplingOptions
from tests.conftest import Open


class Kernels:
    """Kernels that take one second per thread, and their clock."""

    def __init__(self) -> None:
        self.threads, self.now, self.waited, self.warming = 4, 0.0, 0.0, False

    def run(self, wait: float = 0.0) -> None:
        self.waited += wait
        self.now += self.threads + wait

    def set_threads(self, threads: int) -> None:
        self.threads = threads


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    kernels, before = Kernels(), torch.get_num_threads()
    monkeypatch.setattr(compute_threads, "set_compute_threads", kernels.set_threads)
    monkeypatch.setattr(compute_threads, "time", SimpleNamespace(perf_counter=lambda: kernels.now))
    yield kernels
    torch.set_num_threads(before)


def chosen(kernels: Kernels, in_torch: bool = False, tuned: bool = True) -> ComputeThreads:
    return ComputeThreads(4, in_torch, tuned, lambda: kernels.waited, lambda: kernels.warming)


def decode(threads: ComputeThreads, kernels: Kernels, steps: int, wait: float = 0.0) -> None:
    for _ in range(steps):
        with threads.of(1):
            kernels.run(wait)


def test_fewer_threads_stay_where_they_are_faster(kernels: Kernels) -> None:
    threads = chosen(kernels)
    decode(threads, kernels, 400)
    assert threads.decoding == 1
    with threads.of(MOST_ROWS):
        assert kernels.threads == 1
        assert torch.get_num_threads() == 1
    with threads.of(MOST_ROWS + 1):
        assert kernels.threads == 4
        assert torch.get_num_threads() == 4


def test_a_pass_that_waited_says_nothing(kernels: Kernels) -> None:
    threads = chosen(kernels)
    decode(threads, kernels, 400, wait=9.0)
    assert (threads.decoding, kernels.threads) == (4, 4)


def test_a_pass_beside_the_warm_start_says_nothing(kernels: Kernels) -> None:
    threads, kernels.warming = chosen(kernels), True
    decode(threads, kernels, 400)
    assert (threads.decoding, kernels.threads) == (4, 4)
    kernels.warming = False
    decode(threads, kernels, 400)
    assert threads.decoding == 1


@pytest.mark.parametrize(("in_torch", "tuned"), [(True, True), (False, False)])
def test_others_keep_their_number(in_torch: bool, tuned: bool, kernels: Kernels) -> None:
    threads = chosen(kernels, in_torch, tuned)
    decode(threads, kernels, 400)
    assert (threads.decoding, kernels.threads) == (4, 4)
    with threads.of(1):
        assert torch.get_num_threads() == (4 if in_torch else 1)


@pytest.mark.parametrize("memory", ["100%", "20%"])
def test_the_tokens_are_the_same(memory: str, open_engine: Open) -> None:
    greedy = SamplingOptions(temperature=0)
    answers = [
        "".join(Conversation(engine).ask("Write 90817 in words.", greedy, Limits(60)))
        for engine in (open_engine("demo:bf16", memory, tune_threads=t, threads=2) for t in (0, 1))
    ]
    assert answers[0] == answers[1] != ""
