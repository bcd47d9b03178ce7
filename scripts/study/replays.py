"""Run the study's replays in several processes, and estimate intervals from their requests."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.routing.eamc import Eamc
from moeinf.offload.routing.requests_file import read_requests
from moeinf.offload.routing.trace import Recording
from moeinf.offload.simulator.cases import Case, batched, interleaved, run_case
from moeinf.offload.simulator.clock import TimeModel
from moeinf.offload.simulator.replay import Conditions, Replay
from scripts.study.composed import composed

EARLY = 16  # first tokens of an answer
_RESAMPLES = 1000
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Job:
    """One replay. requests: in this order; None: all. past: requests that the EAMC has before.

    together: users decode in one pass, not in turn. forget: finished requests are not added to the
    EAMC. knobs: (name, value) pairs. ahead: the policy whose reads ahead replace those of `policy`;
    "": none are read. machine: the times.
    """

    path: Path
    policy: str
    share: float = 0.2
    requests: tuple[int, ...] | None = None
    past: tuple[int, ...] = ()
    capacity: int | None = None
    users: int = 1
    together: bool = False
    late: bool = False
    forget: bool = False
    knobs: tuple[tuple[str, Any], ...] = ()
    ahead: str | None = None
    machine: TimeModel = field(default_factory=TimeModel)


@dataclass(frozen=True)
class Counts:
    """Decode events of each request, in the order of their first token: arrays [R]."""

    requests: list[int]
    events: Floats
    hits: Floats
    early_events: Floats  # of the first EARLY tokens
    early_hits: Floats
    reads: Floats
    insertions: Floats
    tokens: Floats
    stall_ms: Floats

    @property
    def rate(self) -> float:
        return float(self.hits.sum() / self.events.sum())


class Forgetful(Eamc):
    """An EAMC that stays empty."""

    def add(self, prefill: NDArray[np.integer], decode: NDArray[np.integer]) -> int:
        return -1


@cache
def recording_of(path: Path) -> Recording:
    return read_requests(path).recording()


@cache
def mixed(
    path: Path, requests: tuple[int, ...] | None, users: int, together: bool = False
) -> Recording:
    """Return the chosen requests, `users` at a time, in turn or together in a pass."""
    recording = recording_of(path)
    if requests is not None:
        recording = recording.select(requests)
    if users == 1:
        return recording
    return (batched if together else interleaved)(recording, users)


def collection(path: Path, requests: Sequence[int], capacity: int | None = None) -> Eamc:
    """Return an EAMC with these requests; capacity None: the automatic capacity."""
    recording = recording_of(path)
    size = recording.shape.layers, recording.shape.experts
    eamc = Eamc.automatic(*size) if capacity is None else Eamc(capacity, *size)
    eams = recording.request_eams() if requests else {}
    for request in requests:
        eamc.add(eams[request].prefill, eams[request].decode)
    return eamc


def replay(job: Job) -> Counts:
    """Run one replay. A pass of several users counts for the request of its first row."""
    recording = mixed(job.path, job.requests, job.users, job.together)
    shape = recording.shape
    eamc: Eamc = collection(job.path, job.past, job.capacity)
    if job.forget:
        eamc = Forgetful(1, shape.layers, shape.experts)
    case = Case(job.policy, job.share, knobs=dict(job.knobs))
    if job.ahead is None:
        outcome = run_case(recording, case, job.machine, late=job.late, eamc=eamc)
    else:
        conditions = Conditions(round(job.share * shape.layers * shape.experts), job.machine)
        outcome = Replay(recording, composed(job.policy, job.ahead), conditions, eamc).run()
    places: dict[int, int] = {}
    sums = np.zeros((len(recording.requests), 8))
    for token in outcome.tokens:
        row = sums[places.setdefault(token.request, len(places))]
        row[:2] += token.events, token.hits
        if token.age < EARLY:
            row[2:4] += token.events, token.hits
        row[4:] += token.reads, token.insertions, 1, 1000 * token.stall_seconds
    return Counts(list(places), *sums[: len(places)].T)


@dataclass
class Bench:
    """Runs functions in processes; equal questions are computed once.

    files: the `.npz` files. quick: fewer values of everything, to check that all works.
    """

    files: list[Path]
    quick: bool = False
    processes: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))

    def __post_init__(self) -> None:
        self._pool = ProcessPoolExecutor(self.processes)
        self._asked: dict[Any, Future[Any]] = {}
        self.curves: dict[str, Any] = {}  # what the pictures show

    def ask(self, function: Callable[..., Any], *given: Any) -> Callable[[], Any]:
        """Start a computation; return the function that waits for its result."""
        key = function.__qualname__, given
        if key not in self._asked:
            self._asked[key] = self._pool.submit(function, *given)
        return self._asked[key].result

    def replay(self, path: Path, policy: str, share: float = 0.2, **more: Any) -> Asked:
        if self.quick:
            more.setdefault("requests", self.few(path))
        if more.get("requests") == tuple(range(len(recording_of(path).requests))):
            del more["requests"]
        return self.ask(replay, Job(path, policy, share, **more))

    def few(self, path: Path) -> tuple[int, ...]:
        """Return the first requests, as many as decode 6,000 tokens (quick: 100)."""
        most, chosen = (100 if self.quick else 6000), []
        for number, request in enumerate(read_requests(path).requests):
            most -= len(request.decode_ids)
            if chosen and most < 0:
                break
            chosen.append(number)
        return tuple(chosen)

    def some(self, values: Sequence[Any]) -> Sequence[Any]:
        return values[:1] if self.quick else values

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


Asked = Callable[[], Counts]


def resampled(parts: Floats, wholes: Floats) -> Floats:
    """Return the ratio Σ parts ÷ Σ wholes of _RESAMPLES draws of requests [R], with repetition."""
    chosen = np.random.default_rng(0).integers(len(parts), size=(_RESAMPLES, len(parts)))
    return parts[chosen].sum(1) / np.maximum(wholes[chosen].sum(1), 1e-9)


def half_width(draws: Floats) -> float:
    """Return half the width of the central 95 % of the draws."""
    low, high = np.quantile(draws, (0.025, 0.975))
    return float(high - low) / 2


def percent(parts: Floats, wholes: Floats) -> str:
    """Return a ratio in per cent, and half of its bootstrap interval over requests."""
    ratio = parts.sum() / max(wholes.sum(), 1e-9)
    return f"{100 * ratio:.1f} ±{100 * half_width(resampled(parts, wholes)):.1f}"


def hit_rate(counts: Counts) -> str:
    return percent(counts.hits, counts.events)


def gain(new: Counts, old: Counts, early: bool = False) -> str:
    """Return the difference of two hit rates in points, paired by request, with its interval."""
    both = []
    for counts in (new, old):
        order = np.argsort(counts.requests)
        hits, events = (
            (counts.early_hits, counts.early_events) if early else (counts.hits, counts.events)
        )
        both.append((hits[order], events[order]))
    draws = resampled(*both[0]) - resampled(*both[1])
    rates = [hits.sum() / events.sum() for hits, events in both]
    return f"{100 * (rates[0] - rates[1]):+.1f} ±{100 * half_width(draws):.1f}"


def table(head: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
