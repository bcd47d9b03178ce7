"""Test a replica without Ray: the messages of its answers, and what it publishes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeinf.offload.replicas.router import Published
from moeinf.runtime.config import EngineConfig, PrefixBudget, ServerSettings
from moeinf.runtime.sizes import MemorySize
from moeinf.server.cluster.replica import Replica
from moeinf.server.cluster.request_keys import keys_of

CONFIG = EngineConfig(memory=MemorySize(share=0.5))


def scope_of(path: str, body: bytes) -> dict[str, Any]:
    headers = [(b"host", b"public.example"), (b"content-length", b"%d" % len(body))]
    return {
        "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": path,
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers,
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip


@pytest.mark.parametrize("prefix", [PrefixBudget(), None])
def test_a_replica_answers_and_publishes(
    demo_home: Path, monkeypatch: pytest.MonkeyPatch, prefix: PrefixBudget | None
) -> None:
    monkeypatch.setenv("MOEINF_HOME", str(demo_home))

    async def run() -> None:
        config = replace(CONFIG, prefix=prefix)
        replica = Replica(config, ServerSettings(api_key="secret"), lambda _: None)
        await replica.open()
        body = json.dumps({
            "model": "demo", "prompt": "17+25=", "options": {"temperature": 0}
        }).encode()  # fmt: skip
        keys = keys_of([], body)
        try:
            assert replica.record_routing_stats()["models"] == {}
            start, *parts = [
                m async for m in replica.answer(scope_of("/api/generate", body), body, keys)
            ]
            assert start["status"] == 200
            lines = b"".join(part.get("body", b"") for part in parts).splitlines()
            words = [json.loads(line)["response"] for line in lines]
            assert "".join(words) == "42"
            stats = replica.record_routing_stats()
            published = stats["models"]["demo"]
            assert isinstance(published, Published)
            (observed,) = published.observed
            assert (observed.number, observed.ended) == (keys.number, True)
            layers, experts = observed.eam.shape
            assert published.resident.shape == (layers * experts,)
            assert 0 < published.resident.sum() <= 0.5 * layers * experts + 1
            # Every layer has routed the same number of rows.
            assert len(np.unique(observed.eam.sum(1))) == 1
            assert published.prefixes == frozenset(keys.prefixes if prefix else ())
            assert "moeinf:generation_tokens_total" in stats["metrics"]
            assert replica.record_routing_stats()["models"]["demo"].observed == ()
            await leave(replica)
        finally:
            await replica.close()

    asyncio.run(run())


def test_a_replica_publishes_each_model_under_the_name_that_clients_use(
    demo_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEINF_HOME", str(demo_home))

    async def run() -> None:
        replica = Replica(CONFIG, ServerSettings(), lambda _: None)
        await replica.open()
        sent = {}

        async def ask(path: str, model: str) -> None:
            body = json.dumps({
                "model": model, "prompt": "17+25=", "options": {"temperature": 0}
            }).encode()  # fmt: skip
            sent[model] = keys_of([], body)
            messages = replica.answer(scope_of(path, body), body, sent[model])
            assert [m["status"] async for m in messages if "status" in m] == [200]

        def published() -> dict[str, set[int]]:
            models = replica.record_routing_stats()["models"]
            return {name: {one.number for one in it.observed} for name, it in models.items()}

        try:
            await ask("/api/generate", "demo:f32")
            await ask("/api/show", "demo")  # does not load it: its tag is another one
            assert published() == {"demo:f32": {sent["demo:f32"].number}}
            await ask("/api/generate", "demo:latest")
            assert published() == {
                "demo:f32": set(), "demo": set(), "demo:latest": {sent["demo:latest"].number},
            }  # fmt: skip
        finally:
            await replica.close()

    asyncio.run(run())


async def leave(replica: Replica) -> None:
    """Leave an answer after its first part: the routing of its prompt is known by then."""
    body = json.dumps({
        "model": "demo", "prompt": "a b c", "raw": True,
        "options": {"temperature": 0, "num_predict": 100_000, "num_ctx": 512},
    }).encode()  # fmt: skip
    keys = keys_of([], body)
    answer = replica.answer(scope_of("/api/generate", body), body, keys)
    async for message in answer:
        if message["type"] == "http.response.body":
            break
    (observed,) = replica.record_routing_stats()["models"]["demo"].observed
    assert (observed.number, observed.ended) == (keys.number, False)
    await answer.aclose()  # type: ignore[attr-defined]
    (loaded,) = replica._app.state.host.loaded()
    async with asyncio.timeout(10):
        while not loaded.worker.idle:
            await asyncio.sleep(0.01)
