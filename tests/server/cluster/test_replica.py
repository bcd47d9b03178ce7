"""Test a replica without Ray: the messages of its answers, and what it publishes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeinf.offload.replicas.route_keys import RouteKeys, route_keys
from moeinf.offload.replicas.router import Published
from moeinf.runtime.config import EngineConfig, PrefixBudget, ServerSettings, Settings
from moeinf.runtime.library.library import Library
from moeinf.runtime.prefix.tree import BLOCK, Match, Tree
from moeinf.runtime.sizes import MemorySize
from moeinf.server.cluster.replica import Replica, ends
from moeinf.server.cluster.request_keys import keys_of
from moeinf.server.engines.jobs import Unloaded
from moeinf.server.engines.worker import Worker
from tests.server.engines.test_worker import Asked

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
            assert "moeinf:generation_tokens_total" in stats["metrics"]
            assert replica.record_routing_stats()["models"]["demo"].observed == ()
            await held(replica, keys.prefixes if prefix else ())
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


async def held(replica: Replica, prefixes: tuple[int, ...]) -> None:
    """Wait until the replica publishes these prefixes: KV is kept after an answer has ended."""
    async with asyncio.timeout(10):
        while replica.record_routing_stats()["models"]["demo"].prefixes != set(prefixes):
            await asyncio.sleep(0.01)


async def asked(replica: Replica, prompt: str) -> RouteKeys:
    """Let the demo answer; return the keys of the request."""
    options = {"temperature": 0}
    body = json.dumps({"model": "demo", "prompt": prompt, "options": options}).encode()
    keys = keys_of([], body)
    answer = replica.answer(scope_of("/api/generate", body), body, keys)
    assert [m["status"] async for m in answer if "status" in m] == [200]
    return keys


def test_a_prefix_that_has_left_the_cache_is_not_published(
    demo_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In RAM there is room for one conversation of 12 tokens, and none on disk."""
    monkeypatch.setenv("MOEINF_HOME", str(demo_home))
    manifest, _ = Library(Settings(demo_home)).read("demo")
    budget = PrefixBudget(20 * manifest.kv_bytes_per_token, disk_bytes=0)

    async def run() -> None:
        config = replace(CONFIG, prefix=budget)
        replica = Replica(config, ServerSettings(), lambda _: None, eams=False)
        await replica.open()
        try:
            first = await asked(replica, "17+25=")
            assert replica.record_routing_stats()["models"]["demo"].observed == ()
            await held(replica, first.prefixes)
            second = await asked(replica, "42+11=")
            await held(replica, second.prefixes)
            await asked(replica, "17+25=")
            await held(replica, first.prefixes)
        finally:
            await replica.close()

    asyncio.run(run())


def test_a_prefix_is_held_with_the_node_that_it_ends_in() -> None:
    tree = Tree(b"root")
    first = tree.add(tree.root, np.zeros(BLOCK, np.int32), False, 1)
    last = tree.add(first, np.zeros(100, np.int32), False, 1)
    snapshot = tree.add(first, np.zeros(90, np.int32), True, 1)
    keys = route_keys(0, ["x" * 300, "y" * 50, "z" * 150])
    one, two, three = keys.prefixes
    assert keys.shares == (0.6, 0.7, 1.0)
    whole = list(ends(keys, Match((first, last), BLOCK + 100), BLOCK + 101))
    assert whole == [(one, first.key), (two, first.key), (three, last.key)]
    # 600 tokens, of which one block is held: the last prefix lacks more than a block.
    part = list(ends(keys, Match((first,), BLOCK), 600))
    assert part == [(one, first.key), (two, first.key)]
    resumed = list(ends(keys, Match((first, snapshot), BLOCK + 90), BLOCK + 101))
    assert resumed == [(three, snapshot.key)]
    assert list(ends(keys, Match(), 9)) == []


def test_a_replica_whose_engine_does_not_return_is_not_healthy(
    demo_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray replaces a replica whose check_health has raised three times in a row."""
    close = Worker.close
    monkeypatch.setenv("MOEINF_HOME", str(demo_home))
    monkeypatch.setattr(Worker, "close", lambda self, seconds=0.2: close(self, min(seconds, 0.2)))

    async def run() -> None:
        replica = Replica(CONFIG, ServerSettings(), lambda _: None)
        await replica.open()
        host, hung = replica._app.state.host, Asked()
        try:
            worker = (await host.model("demo")).worker
            worker.submit(hung.job)
            assert await asyncio.to_thread(hung.begun.wait, 20)
            replica.check_health()  # it is at work
            with pytest.raises(Unloaded):
                await host.unload("demo")
            with pytest.raises(RuntimeError):
                replica.check_health()
            hung.may.set()
            assert await asyncio.to_thread(close, worker, 20)
            replica.check_health()
        finally:
            hung.may.set()
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
