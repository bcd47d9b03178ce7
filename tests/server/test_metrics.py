"""Test the counters and times of `/metrics` as a Prometheus server reads them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from moeinf.runtime.generation.events import Times
from moeinf.runtime.generation.scheduler import Scheduler
from moeinf.server.metrics import Metrics
from tests.server.conftest import serving

LONG = {"temperature": 50, "top_k": 0, "top_p": 1, "seed": 7, "num_predict": 400}
MODEL = "demo:bf16"
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "request_time_per_output_token_seconds",
    "request_queue_time_seconds",
)


class Scraped:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        self.types: dict[str, str] = {}
        self._values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in text_string_to_metric_families(text):
            self.types[family.name] = family.type
            for sample in family.samples:
                self._values[sample.name, frozenset(sample.labels.items())] = sample.value

    def value(self, name: str, labels: Mapping[str, str] | None = None, **more: str) -> float:
        """Return the value of one sample; 0 if the sample is absent."""
        wanted = {"model_name": MODEL, **(labels or {}), **more}
        return self._values.get((f"moeinf:{name}", frozenset(wanted.items())), 0.0)

    def requests(self) -> dict[tuple[str, str], float]:
        """Return the number of requests by kind and finish reason."""
        return {
            (about["kind"], about["finished_reason"]): value
            for (name, labels), value in self._values.items()
            if name == "moeinf:request_success_total" and (about := dict(labels))
        }

    def label_values(self) -> set[str]:
        return {value for _, labels in self._values for name, value in labels if name != "le"}


def scrape(address: str) -> Scraped:
    answer = httpx.get(f"{address}/metrics", timeout=60)
    assert answer.headers["content-type"].startswith("text/plain")
    return Scraped(answer.text)


def until(address: str, reached: Callable[[Scraped], bool]) -> Scraped:
    for _ in range(500):
        if reached(found := scrape(address)):
            return found
        time.sleep(0.02)
    raise AssertionError("never reached")


def generate(address: str, prompt: str, options: Mapping[str, object]) -> httpx.Response:
    body = {"model": "demo", "prompt": prompt, "stream": False, "options": options}
    return httpx.post(f"{address}/api/generate", json=body, timeout=60)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every decode pass take 0.03 s or more."""
    decode = Scheduler._decode

    def decode_slowly(self: Scheduler, *arguments: Any) -> None:
        time.sleep(0.03)
        decode(self, *arguments)

    monkeypatch.setattr(Scheduler, "_decode", decode_slowly)


def test_requests_by_how_they_end_and_their_times(demo_home: Path) -> None:
    with serving(demo_home, memory="30%", parallel=2) as address:
        assert scrape(address).requests() == {}
        start = time.perf_counter()
        stopped = generate(address, "17+25=", {"temperature": 0}).json()
        cut = generate(address, "17+25=", {"temperature": 0, "num_predict": 1}).json()
        assert (stopped["done_reason"], cut["done_reason"]) == ("stop", "length")
        embed = {"model": "demo", "input": ["one text", "another"]}
        assert httpx.post(f"{address}/api/embed", json=embed, timeout=60).status_code == 200
        refused = generate(address, "", {"temperature": "warm"})
        assert refused.status_code == 400  # never reached an engine
        too_long = generate(address, "12+34=" * 2000, {})
        assert too_long.json()["code"] == "prompt_too_long"
        spent = time.perf_counter() - start
        found = scrape(address)
        assert found.requests() == {
            ("generation", "stop"): 1,
            ("generation", "length"): 1,
            ("embedding", "stop"): 2,
            ("generation", "error"): 1,
        }
        counted = stopped["eval_count"] + cut["eval_count"]
        assert found.value("generation_tokens_total") == counted
        counts = [found.value(f"{name}_count") for name in HISTOGRAMS]
        assert counts == [2, 1, 4]  # one token alone has no time per further token
        for name in HISTOGRAMS:
            assert found.types[f"moeinf:{name}"] == "histogram"
            assert found.value(f"{name}_bucket", le="+Inf") == found.value(f"{name}_count")
            assert 0 < found.value(f"{name}_sum") < spent
        hits = found.value("expert_cache_hits_total", tier="ram")
        assert 0 < hits < found.value("expert_cache_queries_total")
        assert found.value("expert_bytes_read_total") > 0
        words = {"generation", "embedding", "stop", "length", "error", "ram", "up", "down", MODEL}
        assert found.label_values() == words


@pytest.mark.usefixtures("slow")
def test_a_queue_refuses_and_clients_leave(demo_home: Path) -> None:
    """One request is answered for 0.3 s, one waits, one is refused, and one client leaves."""
    body = {"model": "demo", "prompt": "hi", "stream": False}
    with serving(demo_home, parallel=1, max_queue=1) as address, httpx.Client(timeout=60) as loader:
        loader.post(f"{address}/api/generate", json={"model": "demo"})

        def ask(tokens: int) -> None:
            generate(address, "hi", {**LONG, "num_predict": tokens, "stop": []})

        first, second = (threading.Thread(target=ask, args=(n,)) for n in (30, 2))
        first.start()
        until(address, lambda now: now.value("num_requests_running") == 1)
        second.start()
        until(address, lambda now: now.value("num_requests_waiting") == 1)
        assert generate(address, "hi", LONG).status_code == 503
        first.join()
        second.join()
        found = scrape(address)
        assert found.requests() == {("generation", "length"): 2, ("generation", "refused"): 1}
        name = "request_time_per_output_token_seconds"
        assert found.value(f"{name}_count") == 2
        assert found.value(f"{name}_sum") >= 2 * 0.03
        assert found.value(f"{name}_bucket", le="0.025") == 0
        assert found.value("request_queue_time_seconds_sum") > 0.1  # the second waited
        assert found.value("request_queue_time_seconds_bucket", le="0.1") == 1
        with httpx.stream(
            "POST", f"{address}/api/generate", json={**body, "stream": True, "options": LONG}
        ) as leaving:
            next(leaving.iter_lines())
        found = until(address, lambda now: ("generation", "abort") in now.requests())
        assert found.requests()["generation", "abort"] == 1


def test_two_applications_count_apart(demo_home: Path) -> None:
    with serving(demo_home) as one, serving(demo_home) as other:
        generate(one, "17+25=", {"temperature": 0})
        assert scrape(one).requests() == {("generation", "stop"): 1}
        assert scrape(other).requests() == {}


def test_counters_have_all_their_digits() -> None:
    counts = {"tokens": 1_234_567, "prompt_tokens": 2, "reused_tokens": 1}
    worker = SimpleNamespace(running=0, waiting=0, engine=None, **counts)
    loaded: Any = SimpleNamespace(manifest=SimpleNamespace(model=MODEL), worker=worker)
    found = Scraped(Metrics(lambda: [loaded]).exposition())
    assert found.value("generation_tokens_total") == 1_234_567
    assert found.value("prefix_cache_queries_total") == 2
    assert found.value("prefix_cache_hits_total") == 1


def test_times_of_a_request() -> None:
    times = Times(arrived=10.0, started=12.0, first_token=15.0, last_token=18.0, tokens=4)
    assert times.queue_seconds == 2.0
    assert times.first_token_seconds == 5.0
    assert times.seconds_per_output_token == 1.0
    waiting = Times(arrived=10.0)
    assert waiting.queue_seconds is waiting.first_token_seconds is None
    assert Times(10.0, 12.0, 15.0, 15.0, 1).seconds_per_output_token is None
