"""Test `/api/experts` against the store of a model that answers with little memory."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.library.library import Library
from moeinf.runtime.sizes import parse_memory
from moeinf.server.api import experts_api
from moeinf.server.engines.expert_map import GPU, RAM, READING, USED, ExpertMap, map_of
from moeinf.server.engines.worker import Worker
from tests.server.conftest import serving

ASK = {"model": "demo", "prompt": "17+25=", "stream": False}
WILD = {"temperature": 50, "top_k": 0, "top_p": 1, "seed": 7, "num_predict": 300}


def cells_of(frame: dict[str, Any]) -> NDArray[np.uint8]:
    cells = np.frombuffer(base64.b64decode(frame["map"]), np.uint8)
    assert len(cells) == frame["layers"] * frame["experts"]
    return cells


@pytest.fixture
def engine(demo_home: Path) -> Iterator[Engine]:
    manifest, folder = Library(Settings(demo_home)).read("demo")
    config = EngineConfig(memory=parse_memory("30%"), trace=True)
    with Engine.open(manifest, folder, config, Settings(demo_home)) as opened:
        yield opened


def test_the_map_is_the_stores_residency_and_its_last_routing(engine: Engine) -> None:
    recording = engine.tracing.record("watched")
    state, store = engine.new_state(), engine.store
    engine.extend(state, [5, 6, 7])
    for token in (8, 9):
        before = store.recent.number
        engine.step([(state, token)])
        found = map_of(store, before)
        assert set(np.flatnonzero(found & 3)) == set(store.host.table.present())
        assert np.count_nonzero(found & 3 == RAM) == store.resident
        last = recording.passes[-1]
        per_layer = store.host.experts * np.arange(len(last.ids))[:, None, None]
        used = (last.ids + per_layer)[last.ids >= 0]
        assert set(np.flatnonzero(found & USED)) == set(used.tolist())
        heat = found >> 4
        assert heat.max() == 15
        assert (heat[used] > 0).all()
    worker = SimpleNamespace(engine=engine, tokens=3, running=1, waiting=2)
    watched = ExpertMap(cast(Worker, worker), engine)
    engine.step([(state, 8)])
    frame = watched.frame()
    stats = store.stats
    assert frame["hits"] == stats.decode_hits + stats.prefill_hits > 0
    uses = stats.decode_events + stats.prefill_events
    assert frame["misses"] == uses - frame["hits"] > 0
    assert frame["hit_rate"] == frame["hits"] / uses
    assert frame["tiers"]["ram"]["slots"] == engine.info.slots
    assert frame["tiers"]["ram"]["experts"] + frame["tiers"]["disk"]["experts"] == 192
    assert frame["layer_numbers"] == list(range(frame["layers"]))
    assert (cells_of(frame) & USED).any()
    assert not (cells_of(watched.frame()) & USED).any()  # nothing since
    store.stats.bytes_read += 3000
    store.stats.bus_bytes += 1000
    moved = watched.frame()
    assert moved["read_bytes_per_s"] == pytest.approx(3 * moved["bus_bytes_per_s"])
    assert moved["bus_bytes_per_s"] > 0
    assert moved["budget_bytes"] == engine.info.placement.memory_bytes
    assert moved["queue"] == {"running": 1, "waiting": 2}
    worker.engine = None
    assert watched.gone


def test_what_was_read_ahead_and_the_bytes_of_a_tier(demo_home: Path) -> None:
    """With 8 slots and 24 experts per token, each hit was read ahead."""
    manifest, folder = Library(Settings(demo_home)).read("demo")
    config = EngineConfig(memory=parse_memory("393216"))
    with Engine.open(manifest, folder, config, Settings(demo_home)) as engine:
        state = engine.new_state()
        engine.extend(state, [5, 6, 7])
        for token in range(8, 40):
            engine.step([(state, token)])
        worker = SimpleNamespace(engine=engine, tokens=3, running=1, waiting=2)
        before = engine.store.stats.copy()  # reads may still go on
        frame = ExpertMap(cast(Worker, worker), engine).frame()
        after = engine.store.stats
        told = frame["prediction"]
        for name, counter in (
            ("read_bytes", "ahead_bytes_read"), ("used_bytes", "ahead_bytes_used"),
            ("hits_hinted", "decode_hits_hinted"), ("hits_predicted", "decode_hits_predicted"),
        ):  # fmt: skip
            assert getattr(before, counter) <= told[name] <= getattr(after, counter)
    assert 0 < told["used_bytes"] <= told["read_bytes"]
    assert told["used_bytes"] + told["wasted_bytes"] <= told["read_bytes"]
    assert told["hits_hinted"] + told["hits_predicted"] > 0
    ram = frame["tiers"]["ram"]
    assert (ram["slots"], ram["bytes"]) == (8, 49152 * ram["experts"])
    assert 0 < ram["experts"] <= 8


def test_endpoint_and_stream(demo_home: Path) -> None:
    with serving(demo_home, "30%") as address:
        url = f"{address}/api/experts"
        for query, words in (("", "no model is loaded"), ("?model=demo", "moeinf run demo:bf16")):
            refused = httpx.get(url + query, timeout=60)
            assert (refused.status_code, refused.json()["code"]) == (404, "not_loaded")
            assert words in refused.json()["error"]
        refused = httpx.get(f"{url}?model=none", timeout=60)
        assert (refused.status_code, refused.json()["code"]) == (404, "model_not_found")
        httpx.post(f"{address}/api/generate", json={"model": "demo"}, timeout=60)
        fresh = httpx.get(url, timeout=60).json()
        assert (fresh["hits"], fresh["misses"], fresh["hit_rate"]) == (0, 0, None)
        assert not (cells_of(fresh) & ~np.uint8(7)).any()
        httpx.post(f"{address}/api/generate", json=ASK, timeout=60)
        frame = httpx.get(url, params={"model": "demo"}, timeout=60).json()
        assert 0 < frame["hit_rate"] < 1
        assert frame["queue"] == {"running": 0, "waiting": 0}
        assert (cells_of(frame) >> 4).max() == 15
        assert cells_of(frame).tolist().count(0) > 0
        foreign = httpx.get(url, headers={"Origin": "http://evil.example"}, timeout=60)
        assert foreign.json()["code"] == "unknown_origin"
        with httpx.stream("GET", f"{url}?stream=1", timeout=60) as lines:
            assert lines.headers["content-type"] == "application/x-ndjson"
            told = lines.iter_lines()
            assert not (cells_of(json.loads(next(told))) & USED).any()
            httpx.post(f"{address}/api/generate", json={**ASK, "options": WILD}, timeout=60)
            frames = [json.loads(next(told))]
            while not frames[-1]["tokens_per_s"]:  # those before the answer
                frames.append(json.loads(next(told)))
            assert any((cells_of(frame) & USED).any() for frame in frames)
            assert any(frame["read_bytes_per_s"] > 0 for frame in frames)
            frames += [json.loads(next(told)) for _ in range(4)]
            between = [b["time"] - a["time"] for a, b in pairwise(frames)]
            assert 0.2 < min(between) < 0.5  # four a second
            body = {"model": "demo", "keep_alive": 0}
            httpx.post(f"{address}/api/generate", json=body, timeout=60)
            list(told)  # it ends with the model
        gone = httpx.get(f"{url}?model=demo", timeout=60)
        assert gone.json()["code"] == "not_loaded"


def test_streams_are_few_and_end_with_their_clients(
    demo_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts_api, "MOST_STREAMS", 1)
    with serving(demo_home, api_key="secret") as address:
        url, key = f"{address}/api/experts", {"Authorization": "Bearer secret"}
        assert httpx.get(url, timeout=60).json()["code"] == "invalid_api_key"
        body = {"model": "demo"}
        httpx.post(f"{address}/api/generate", json=body, headers=key, timeout=60)
        for _ in range(2):
            with httpx.stream("GET", f"{url}?stream=1", headers=key, timeout=60) as lines:
                next(lines.iter_lines())
                full = httpx.get(f"{url}?stream=1", headers=key, timeout=60)
                assert (full.status_code, full.json()["code"]) == (503, "too_many_streams")
            for _ in range(100):
                with httpx.stream("GET", f"{url}?stream=1", headers=key, timeout=60) as again:
                    if again.status_code == 200:
                        break
            assert again.status_code == 200


def test_an_expert_on_the_gpu_and_in_ram_counts_as_on_the_gpu(engine: Engine) -> None:
    store = engine.store
    engine.extend(engine.new_state(), [5, 6, 7])
    (first, *_) = store.host.table.present()
    places = np.full(192, -1, np.intc)
    places[[first, 191]] = 0, 1
    upper = SimpleNamespace(table=SimpleNamespace(places=lambda: places))
    both = SimpleNamespace(host=store.host, above=(upper,), recent=store.recent)
    tiers = map_of(cast(Any, both), 0) & 3
    assert np.flatnonzero(tiers == GPU).tolist() == [first, 191]


def test_an_expert_that_is_being_read_is_not_yet_in_ram(engine: Engine) -> None:
    store = engine.store
    engine.extend(engine.new_state(), [5, 6, 7])
    places = store.host.table.places().copy()
    (absent, *_) = np.flatnonzero(places < 0)
    places[absent] = -2
    table = SimpleNamespace(places=lambda: places)
    reading = SimpleNamespace(host=SimpleNamespace(table=table), above=(), recent=store.recent)
    found = map_of(cast(Any, reading), 0)
    assert np.flatnonzero(found & READING).tolist() == [absent]
    assert found[absent] & 3 == 0
