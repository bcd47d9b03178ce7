"""Test the id of each answer of /v1/messages: in a header, and in an error's body."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import pytest

from moeinf.server.api.messages.answer import RequestIds
from moeinf.server.engines.model_manager import ModelManager
from tests.server.api.test_progress import LONG
from tests.server.scripted import Script

ID = re.compile("req_[0-9a-f]{24}")
ASK: dict[str, Any] = {
    "model": "demo", "max_tokens": 9, "messages": [{"role": "user", "content": "1+2"}],
}  # fmt: skip


@pytest.fixture
def client(chatml: str) -> Any:
    with anthropic.Anthropic(base_url=chatml, api_key="any", max_retries=0) as found:
        yield found


def test_the_client_shows_the_id_of_each_answer(
    client: anthropic.Anthropic, chatml: str, script: Script
) -> None:
    script.say("3")
    whole = client.messages.create(**ASK)
    asked = {name: value for name, value in ASK.items() if name != "max_tokens"}
    counted = client.messages.count_tokens(**asked)
    with client.messages.stream(**ASK) as stream:
        stream.until_done()
        streamed = stream.response.headers["request-id"]
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**{**ASK, "model": "nothing"})
    found = [whole._request_id, counted._request_id, streamed, missing.value.request_id]
    assert all(ID.fullmatch(str(one)) for one in found)
    assert len(set(found)) == 4
    assert isinstance(missing.value.body, dict)
    assert missing.value.body["request_id"] == missing.value.request_id
    others = [httpx.get(f"{chatml}{path}") for path in ("/v1/models", "/api/tags")]
    assert all("request-id" not in one.headers for one in others)


@pytest.mark.parametrize(
    ("about", "status"),
    [
        ({"method": "GET"}, 405),
        ({"headers": {"Origin": "http://evil.example"}}, 403),
        ({"content": b"{no"}, 400),
        ({"json": {}}, 400),
        ({"path": "/v1/messages/none"}, 404),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_each_refusal_has_its_id(about: dict[str, Any], status: int, chatml: str) -> None:
    about = {"method": "POST", "path": "/v1/messages", **about}
    told = httpx.request(about.pop("method"), chatml + about.pop("path"), timeout=60, **about)
    assert told.status_code == status
    assert ID.fullmatch(told.headers["request-id"])
    assert told.json()["request_id"] == told.headers["request-id"]


@pytest.mark.parametrize("kind", [KeyError, ZeroDivisionError])
def test_a_bug_has_its_id(
    kind: type[Exception], chatml: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second has no handler inside the application's layers."""

    async def fail(*_: object) -> None:
        raise kind("planted")

    monkeypatch.setattr(ModelManager, "model", fail)
    told = httpx.post(f"{chatml}/v1/messages", json=ASK, timeout=60)
    assert told.status_code == 500
    assert ID.fullmatch(told.headers["request-id"])
    assert told.json()["request_id"] == told.headers["request-id"]


def test_a_late_error_has_the_id_of_its_stream(
    chatml: str, script: Script, fail_reading: Callable[[], None]
) -> None:
    script.say("42")
    fail_reading()
    long = {**ASK, "stream": True, "messages": [{"role": "user", "content": LONG}]}
    with httpx.stream("POST", f"{chatml}/v1/messages", json=long, timeout=60) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    last = json.loads(lines[-1].removeprefix("data: "))
    assert last["type"] == "error"
    assert last["request_id"] == answer.headers["request-id"]


def test_the_id_of_a_replica_is_kept() -> None:
    """An ingress passes on an answer that has an id."""
    sent = list[Any]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"Request-Id", b"req_1")] if scope["method"] == "POST" else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def send(message: Any) -> None:
        sent.append(dict(message["headers"]))

    for method in ("POST", "GET"):
        scope = {"type": "http", "method": method, "path": "/v1/messages"}
        asyncio.run(RequestIds(app)(scope, None, send))
    assert sent[0] == {b"Request-Id": b"req_1"}
    assert ID.fullmatch(sent[1][b"request-id"].decode())
