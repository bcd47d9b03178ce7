"""Serve `/metrics` in Prometheus' text format, with vLLM's names where it has them.

Label values are names of models that were loaded here and words of this file, never text of a
request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moeinf.runtime.generation.events import Ended, Event, Failed, Times
from moeinf.server.engines.jobs import Busy, Job
from moeinf.server.engines.model_manager import Loaded

if TYPE_CHECKING:
    from moeinf.offload.store.stats import StoreStats
    from moeinf.runtime.engine.moving_memory import Moves
    from moeinf.server.engines.worker import Worker

_PREFIX = "moeinf:"
_FINISHED = {"stop": "stop", "length": "length", "cancelled": "abort"}  # vLLM's words
_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
_OUTPUT_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5,
    7.5, 10, 20, 40, 80,
)  # fmt: skip
_QUEUE_S = (
    0.01, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960,
    1920, 7680,
)  # fmt: skip

_OF_WORKERS: tuple[tuple[str, str, Callable[[Worker], float]], ...] = (
    ("num_requests_running", "Requests being answered.", lambda worker: worker.running),
    ("num_requests_waiting", "Requests in the queue.", lambda worker: worker.waiting),
)
_COUNTS: tuple[tuple[str, str, Callable[[Worker], float]], ...] = (
    ("generation_tokens", "Tokens decoded.", lambda worker: worker.tokens),
    ("prefix_cache_queries", "Prompt tokens.", lambda worker: worker.prompt_tokens),
    (
        "prefix_cache_hits",
        "Prompt tokens whose KV was there from an earlier request.",
        lambda worker: worker.reused_tokens,
    ),
)
_OF_STORES: tuple[tuple[str, str, list[str], Callable[[StoreStats], float]], ...] = (
    (
        "expert_cache_hits",
        "Expert uses that found the expert in the tier.",
        ["ram"],
        lambda stats: stats.decode_hits + stats.prefill_hits,
    ),
    (
        "expert_cache_queries",
        "Expert uses.",
        [],
        lambda stats: stats.decode_events + stats.prefill_events,
    ),
    (
        "expert_bytes_read",
        "Bytes of experts read from disk.",
        [],
        lambda stats: stats.bytes_read,
    ),
    (
        "expert_low_reads",
        "Reads of copies of experts in fewer bits (--experts q2-on-miss).",
        [],
        lambda stats: stats.low_reads,
    ),
    (
        "expert_low_bytes_spared",
        "Bytes by which those reads were smaller than reads of the experts.",
        [],
        lambda stats: stats.low_bytes_spared,
    ),
    (
        "expert_stall_seconds",
        "Time spent only waiting for experts.",
        [],
        lambda stats: stats.stall_seconds,
    ),
)


_OF_MEMORY: tuple[tuple[str, Callable[[Moves], int]], ...] = (
    ("up", lambda moves: moves.grown),
    ("down", lambda moves: moves.shrunk),
)


class Metrics:
    """The metrics of one application, in a registry of its own."""

    def __init__(self, loaded: Callable[[], Iterable[Loaded]]) -> None:
        """Read gauges and counters of engines from `loaded` at each scrape."""
        self._registry = CollectorRegistry()
        self._registry.register(_Engines(loaded))
        self._requests = Counter(
            f"{_PREFIX}request_success",
            "Requests that ended: stop, length, abort (client left), error, refused (queue full).",
            ["model_name", "kind", "finished_reason"],
            registry=self._registry,
        )
        self._queue = self._seconds("request_queue_time", "Time from arrival to prefill.", _QUEUE_S)
        self._first_token = self._seconds(
            "time_to_first_token",
            "Time from arrival to the first token.",
            _FIRST_TOKEN_S,
        )
        self._output_token = self._seconds(
            "request_time_per_output_token",
            "Mean time of a request's tokens after the first.",
            _OUTPUT_TOKEN_S,
        )

    def _seconds(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(
            f"{_PREFIX}{name}_seconds",
            text,
            ["model_name"],
            registry=self._registry,
            buckets=tuple(buckets),
        )

    def exposition(self) -> str:
        """Return all metrics as text."""
        return generate_latest(self._registry).decode()

    def watch(self, loaded: Loaded, job: Job) -> Callable[[Event], None]:
        """Return a function that counts the job at the first of its last events.

        It holds neither of them: the job holds it.
        """
        counted, model, times = False, str(loaded.manifest.model), job.times
        kind = "count" if job.counts else "embedding" if job.embed else "generation"

        def see(event: Event) -> None:
            nonlocal counted
            if not counted and isinstance(event, Ended | Failed):
                counted = True
                self._count(model, kind, times, event)

        return see

    def _count(self, model: str, kind: str, times: Times, event: Ended | Failed) -> None:
        self._requests.labels(model, kind, _reason(event)).inc()
        for histogram, seconds in (
            (self._queue, times.queue_seconds),
            (self._first_token, times.first_token_seconds),
            (self._output_token, times.seconds_per_output_token),
        ):
            if seconds is not None:
                histogram.labels(model).observe(seconds)


def _reason(event: Ended | Failed) -> str:
    if isinstance(event, Ended):
        return _FINISHED[event.reason]
    return "refused" if isinstance(event.error, Busy) else "error"


class _Engines(Collector):
    """Metrics of the engines that are loaded at the time of a scrape."""

    def __init__(self, loaded: Callable[[], Iterable[Loaded]]) -> None:
        self._loaded = loaded

    def collect(self) -> Iterator[Metric]:
        """Yield a family per metric, with a sample per model."""
        workers = [(str(one.manifest.model), one.worker) for one in self._loaded()]
        for name, text, worker_value in _OF_WORKERS:
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=["model_name"])
            for model, worker in workers:
                gauge.add_metric([model], worker_value(worker))
            yield gauge
        for name, text, worker_count in _COUNTS:
            tokens = CounterMetricFamily(_PREFIX + name, text, labels=["model_name"])
            for model, worker in workers:
                tokens.add_metric([model], worker_count(worker))
            yield tokens
        sizes = GaugeMetricFamily(
            f"{_PREFIX}prefix_cache_bytes",
            "Bytes of the KV of ended requests.",
            labels=["model_name", "tier"],
        )
        engines = [(model, worker.engine) for model, worker in workers]
        slots = GaugeMetricFamily(
            f"{_PREFIX}expert_slots", "Experts that fit in RAM.", labels=["model_name"]
        )
        moves = CounterMetricFamily(
            f"{_PREFIX}memory_moves",
            "Changes of the memory of experts.",
            labels=["model_name", "direction"],
        )
        for model, engine in engines:
            if engine is not None:
                slots.add_metric([model], engine.memory.slots)
                for direction, count in _OF_MEMORY:
                    moves.add_metric([model, direction], count(engine.memory.moves))
        yield slots
        yield moves
        for name, text, tier, store_value in _OF_STORES:
            labels = ["model_name", "tier"] if tier else ["model_name"]
            counter = CounterMetricFamily(_PREFIX + name, text, labels=labels)
            for model, engine in engines:
                if engine is not None:
                    counter.add_metric([model, *tier], store_value(engine.store.stats))
            yield counter
        for model, engine in engines:
            if engine is not None and engine.prefixes is not None:
                sizes.add_metric([model, "ram"], engine.prefixes.bytes_used)
                sizes.add_metric([model, "disk"], engine.prefixes.disk_bytes)
        yield sizes
