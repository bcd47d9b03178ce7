"""Test the line per request that `moeinf serve --verbose` prints."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from moeinf.runtime.config import EngineConfig, ServerSettings, Settings
from moeinf.server.app import create_app
from moeinf.server.http.request_log import RequestLog, RequestNotes, line_of

TIME = re.compile(r"\b\d+ ms\b")
ASK: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "17+25="}]}


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def client(demo_home: Path, lines: list[str]) -> Iterator[httpx.Client]:
    """Yield a client of the application with --verbose; other lines are an engine's choices."""
    settings = ServerSettings(verbose=True)
    app = create_app(Settings(demo_home), settings, EngineConfig(trace=False), lines.append)
    with client_of(app) as found:
        yield found


def client_of(app: Any) -> Any:
    from starlette.testclient import TestClient

    return TestClient(app, base_url="http://localhost", raise_server_exceptions=False)


def requests(lines: list[str]) -> list[str]:
    return [TIME.sub("N ms", line) for line in lines if TIME.search(line)]


def test_a_line_has_method_path_status_time_and_tokens(
    client: httpx.Client, lines: list[str]
) -> None:
    client.get("/api/version")
    client.get("/nowhere?key=secret")
    client.post("/v1/chat/completions", json={**ASK, "temperature": 0, "store": True, "new": 1})
    client.post("/api/chat", json={**ASK, "options": {"temperature": 0, "num_gpu": 9, "foo": 1}})
    client.post("/v1/embeddings", json={"model": "demo", "input": ["a", "a"]})
    client.post("/api/chat", json={"model": "nothing", "messages": ASK["messages"]})
    client.get("/api/tags", headers={"Host": "evil.example"})
    assert requests(lines) == [
        "GET /api/version 200 N ms",
        "GET /nowhere 404 N ms",
        "POST /v1/chat/completions 200 N ms, 9 prompt tokens, 3 tokens, ignored: store new",
        "POST /api/chat 200 N ms, 9 prompt tokens, 3 tokens, ignored: num_gpu foo",
        "POST /v1/embeddings 200 N ms, 2 prompt tokens, 0 tokens",
        "POST /api/chat 404 N ms",
        "GET /api/tags 403 N ms",
    ]


def test_without_verbose_no_line_is_written(demo_home: Path, lines: list[str]) -> None:
    app = create_app(Settings(demo_home), ServerSettings(), EngineConfig(), lines.append)
    with client_of(app) as client:
        assert client.get("/api/version").status_code == 200
    assert lines == []


def test_control_characters_are_escaped(client: httpx.Client, lines: list[str]) -> None:
    """A path cannot add a line, nor steer a terminal; names of fields neither."""
    client.get("/a%0Ab%1b%5B31m%C3%A9%E2%80%AE")
    client.get("/" + "x" * 1000)
    client.post("/v1/chat/completions", json={**ASK, "max_tokens": 1, "a\n\x1b[2J": 1})
    client.post(
        "/v1/chat/completions", json={**ASK, "max_tokens": 1} | {f"f{i}": i for i in range(90)}
    )
    first, long, named, many = requests(lines)
    assert first == r"GET /a\nb\x1b[31m\xe9\u202e 404 N ms"
    assert long == f"GET /{'x' * 199}… 404 N ms"
    assert named.endswith(r"ignored: a\n\x1b[2J")
    assert many.endswith("f14 f15…")


def test_words_of_a_line() -> None:
    notes = RequestNotes()
    assert line_of("GET", "/", None, 12.4, notes) == "GET / - 12 ms"
    notes.count(5, 0)
    notes.count(6, 2)
    assert line_of("POST", "/x", 200, 0.5, notes) == "POST /x 200 0 ms, 11 prompt tokens, 2 tokens"


@pytest.mark.parametrize("answered", [True, False])
def test_a_failure_still_has_a_line(answered: bool, lines: list[str]) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if answered:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise TypeError

    async def send(message: Any) -> None:
        pass

    scope = {"type": "http", "method": "GET", "path": "/"}
    with pytest.raises(TypeError):
        asyncio.run(RequestLog(app, lines.append)(scope, None, send))
    assert requests(lines) == [f"GET / {200 if answered else 500} N ms"]


def test_a_listener_that_has_left_ends_no_answer() -> None:
    def leave(_: str) -> None:
        raise BrokenPipeError

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    sent = list[Any]()

    async def send(message: Any) -> None:
        sent.append(message["status"])

    scope = {"type": "http", "method": "GET", "path": "/"}
    asyncio.run(RequestLog(app, leave)(scope, None, send))
    assert sent == [200]
