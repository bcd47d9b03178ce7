"""Test deep bodies, numbers that JSON lacks, bodies too long in sum, and internal errors."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import moeinf.server.api.embeddings
import moeinf.server.http.bodies
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.library.library import Library
from moeinf.server.engines.model_manager import ModelManager
from moeinf.server.http.bodies import Body, Budget, JsonRequest
from moeinf.server.http.refusals import BodiesTooLong
from tests.server.conftest import serving
from tests.server.scripted import CHATML, talking
from tests.server.test_http import connected, until

ENDPOINTS = (
    "/api/generate", "/api/chat", "/api/embed", "/api/embeddings", "/api/show", "/api/copy",
    "/api/pull", "/api/verify", "/api/plan", "/v1/chat/completions", "/v1/completions",
    "/v1/embeddings", "/v1/messages", "/v1/responses",
)  # fmt: skip


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with talking(tmp_path_factory.mktemp("talker"), CHATML, parallel=2) as address:
        yield address


def nested(depth: int) -> str:
    return '{"a":[' * (depth // 2) + "1" + "]}" * (depth // 2)


def deep_bodies(value: str) -> dict[str, tuple[str, str]]:
    """Return, by name, an endpoint and a body that contains `value`."""
    start = '{"model": "demo", "stream": false, '
    user = '{"role": "user", "content": "hi"'
    call = '{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", '
    text = json.dumps(value)
    tool = '{"type": "function", "function": {"name": "f", "parameters": '
    found = {}
    for path, limit in (
        ("/api/chat", '"options": {"num_predict": 1}'),
        ("/v1/chat/completions", '"max_tokens": 1'),
    ):
        for name, messages in {
            "extra": f'{user}, "extra": {value}}}',
            "arguments": f'{call}"arguments": {value}}}}}]}}, {user}}}',
            "arguments as text": f'{call}"arguments": {text}}}}}]}}, {user}}}',
            "extra of a call": f'{call}"arguments": {{}}}}, "x": {value}}}]}}, {user}}}',
        }.items():
            found[f"{path} {name}"] = path, f'{start}{limit}, "messages": [{messages}]}}'
        found[f"{path} tools"] = (
            path,
            f'{start}{limit}, "messages": [{user}}}], "tools": [{tool}{value}}}}}]}}',
        )
    found["options"] = "/api/generate", f'{start}"prompt": "", "options": {{"stop": [{value}]}}}}'
    found["images"] = "/api/generate", f'{start}"prompt": "", "images": [{value}]}}'
    found["prompt"] = "/v1/completions", f'{start}"prompt": {value}}}'
    found["metadata"] = (
        "/v1/chat/completions",
        f'{start}"messages": [{user}}}], "metadata": {value}}}',
    )
    return found


@pytest.mark.parametrize("depth", [80, 600, 20_000])
def test_deep_values(depth: int, talker: str) -> None:
    """A value of 600 levels once passed the parser, and ended as a RecursionError."""
    found = {}
    for name, (path, body) in deep_bodies(nested(depth)).items():
        headers = {"Content-Type": "application/json"}
        answer = httpx.post(f"{talker}{path}", content=body, headers=headers, timeout=60)
        found[name] = answer.status_code
    assert set(found.values()) <= {200, 400}, found
    if depth == 80:
        assert found["/api/chat arguments"] == found["/v1/chat/completions extra"] == 200
    else:
        assert {n for n, status in found.items() if status == 200} <= {
            f"{path} arguments as text" for path in ("/api/chat", "/v1/chat/completions")
        }


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000])
def test_numbers_that_json_lacks(number: str, address: str) -> None:
    headers = {"Content-Type": "application/json"}
    for path in ENDPOINTS:
        body = f'{{"model": "demo", "extra": {number}}}'
        answer = httpx.post(f"{address}{path}", content=body, headers=headers)
        assert answer.status_code == 400, path
        assert re.search(r"number|digits", answer.text), path


def test_vectors_that_are_no_numbers(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def vectors(*_: Any, **__: Any) -> tuple[list[Any], int]:
        return [np.array([1.5, np.nan], np.float32), np.array([np.inf, 0], np.float32)], 3

    monkeypatch.setattr(moeinf.server.api.embeddings, "_vectors", vectors)
    new = httpx.post(f"{address}/api/embed", json={"model": "demo", "input": "a"}, timeout=60)
    assert new.json()["embeddings"] == [[1.5, None], [None, 0.0]]
    old = httpx.post(f"{address}/api/embeddings", json={"model": "demo", "prompt": "a"})
    assert old.json()["embedding"] == [1.5, None]
    openai = httpx.post(f"{address}/v1/embeddings", json={"model": "demo", "input": "a"})
    assert [one["embedding"] for one in openai.json()["data"]] == [[1.5, None], [None, 0.0]]
    assert all("NaN" not in answer.text for answer in (new, old, openai))


def half_sent(address: str, size: int) -> socket.socket:
    sock = connected(address)
    head = b"POST /api/show HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (size + 1)
    sock.sendall(head + b" " * size)
    return sock


def test_bodies_that_are_too_long_together(
    demo_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moeinf.server.http.bodies, "ALL_BODIES_BYTES", 1 << 20)
    long = json.dumps({"model": "nowhere", "name": "x" * 500_000})
    with serving(demo_home) as address:
        assert httpx.post(f"{address}/api/show", content=long).status_code == 404
        socks = [half_sent(address, 450_000) for _ in range(2)]
        try:
            for _ in range(100):
                refused = httpx.post(f"{address}/api/show", content=long)
                if refused.status_code == 503:
                    break
                time.sleep(0.05)  # until the sent bytes arrive
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert httpx.post(f"{address}/api/show", json={"model": "nowhere"}).status_code == 404
        finally:
            for sock in socks:
                sock.close()
        for _ in range(100):
            again = httpx.post(f"{address}/api/show", content=long).status_code
            if again != 503:
                break
            time.sleep(0.05)
        assert again == 404


def body_of(budget: Budget, value: Any) -> tuple[Body, Callable[[], Coroutine[Any, Any, Any]]]:
    """Return a body that has arrived, and a function that parses it."""
    data = value if isinstance(value, bytes) else json.dumps(value).encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": data, "more_body": False}

    async def parse() -> Any:
        body._deadline = asyncio.get_running_loop().time() + 60
        scope = {"type": "http", "state": {"body": body}, "headers": []}
        return await JsonRequest(scope, body.receive).json()

    async def made() -> Body:
        return Body(receive, budget)

    body = asyncio.run(made())
    return body, parse


def test_what_is_parsed_counts_until_the_end() -> None:
    """100 uncounted bodies of 64 KiB with 4,085 messages each once took 426 MB in the queue."""
    budget, wasteful = Budget(), {"messages": [{"role": "user"}] * 2000}  # 34 KB
    bodies, refused = [], []
    for _ in range(100):
        body, parse = body_of(budget, wasteful)
        bodies.append(body)
        try:
            assert asyncio.run(parse()) == wasteful
        except BodiesTooLong as error:
            refused.append((error.status_code, (error.headers or {})["Retry-After"]))
    assert refused == [(503, "1")] * (100 - (64 << 20) // (1874 << 10))
    assert (64 << 20) - (1874 << 10) < budget.held_bytes <= 64 << 20
    for body in bodies:
        body.close()
    assert budget.held_bytes == 0


def test_an_ordinary_request_is_parsed_when_there_is_no_room() -> None:
    budget = Budget()
    assert budget.take(64 << 20)
    messages = [{"role": "user", "content": "hello " * 100}] * 50
    chat = {"model": "demo", "messages": messages, "tools": [{"function": {"name": "f"}}] * 10}
    body, parse = body_of(budget, chat)
    assert asyncio.run(parse()) == chat
    body.close()
    assert budget.held_bytes == 64 << 20


def test_any_body_is_parsed_alone() -> None:
    budget, most = Budget(), b"[" + b"[],[]," * 35_000 + b"[]" + b" " * (8_388_607 - 210_004) + b"]"
    body, parse = body_of(budget, most)
    assert len(asyncio.run(parse())) == 70_001
    body.close()
    assert budget.held_bytes == 0


def test_a_body_that_is_refused_for_what_is_in_it(
    demo_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moeinf.server.http.bodies, "ALL_BODIES_BYTES", 1 << 20)
    with serving(demo_home) as address:
        for _ in range(3):
            many = {"model": "nowhere", "messages": [{"role": "user"}] * 2000}
            refused = httpx.post(f"{address}/api/chat", json=many)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            few = {"model": "nowhere", "messages": [{"role": "user"}] * 900}
            assert httpx.post(f"{address}/api/chat", json=few).status_code == 404


def test_a_body_of_more_than_8_mib(address: str) -> None:
    answer = httpx.post(f"{address}/api/show", content=b" " * (8 << 20) + b"{}")
    assert answer.status_code == 413
    assert answer.json()["code"] == "body_too_long"


def test_a_ValueError_of_ours_is_a_bug(  # noqa: N802
    demo_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only an error that names an invalid value is caused by the request."""
    (tmp_path / "models").symlink_to(demo_home / "models")
    log = tmp_path / "logs/moeinf.log"
    for kind, status, code in (
        (ValueError, 500, "internal"),
        (KeyError, 500, "internal"),
        (ZeroDivisionError, 500, "internal"),
        (InvalidValue, 400, "invalid"),
    ):

        async def fail(*_: Any, kind: type[Exception] = kind) -> Any:
            raise kind("planted")

        def find(*_: Any, kind: type[Exception] = kind) -> Any:
            raise kind("planted")

        monkeypatch.setattr(ModelManager, "model", fail)
        monkeypatch.setattr(Library, "read", find)
        with serving(tmp_path) as address:
            for path, body in {
                "/api/generate": {"prompt": "a"},
                "/api/embed": {"input": "a"},
                "/api/show": {},
                "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
                "/v1/embeddings": {"input": "a"},
            }.items():
                before = log.read_text().count("Traceback") if log.exists() else 0
                answer = httpx.post(f"{address}{path}", json={"model": "demo", **body})
                about = answer.json()
                about = about["error"] if path.startswith("/v1") else about
                assert (answer.status_code, about["code"]) == (status, code)
                assert ("this is a bug" in answer.text) == (status == 500)
                bugs = log.read_text().count("Traceback") if log.exists() else 0
                assert bugs - before == (status == 500)


def test_values_that_cannot_be(address: str) -> None:
    """Each gets status 400 and a code, in both error formats."""
    until(address, "")
    for path, body in (
        ("/api/generate", {"prompt": "a", "options": {"temperature": -1}}),
        ("/api/generate", {"prompt": "a", "options": {"top_k": "x"}}),
        ("/api/generate", {"prompt": "a", "keep_alive": "9" * 40_000}),
        ("/api/generate", {"prompt": "", "raw": True, "system": "", "keep_alive": "soon"}),
        ("/api/generate", {"prompt": "a", "options": {"stop": [1, {}]}}),
        ("/api/generate", {"prompt": "a", "options": {"stop": ["a"] * 300}}),
        ("/api/generate", {"prompt": "a", "options": {"stop": "a" * 2000}}),
        ("/v1/completions", {"prompt": "a", "stop": ["a" * 2000]}),
        ("/v1/completions", {"prompt": "a", "stop": "a" * 2000}),
        ("/api/embed", {"input": "a", "keep_alive": "9" * 40_000}),
        ("/v1/completions", {"prompt": "a", "top_k": -5}),
        ("/v1/completions", {"prompt": "a", "seed": 1 << 70}),
        ("/v1/completions", {"prompt": ""}),
        ("/v1/completions", {"prompt": [1 << 40]}),
        ("/v1/embeddings", {"input": [1 << 40]}),
        ("/v1/embeddings", {"input": ""}),
        ("/v1/embeddings", {"input": []}),
        ("/v1/chat/completions", {"messages": []}),
    ):
        start = time.monotonic()
        answer = httpx.post(f"{address}{path}", json={"model": "demo", **body}, timeout=60)
        assert answer.status_code == 400, (path, body, answer.text)
        about = answer.json()
        assert (about["error"] if path.startswith("/v1") else about)["code"]
        assert len(answer.content) < 3000
        assert time.monotonic() - start < 20
