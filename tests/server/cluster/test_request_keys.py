"""Test what the ingress reads from a request to route it."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

from moeinf.offload.replicas.route_keys import prefixes
from moeinf.server.cluster import request_keys
from moeinf.server.cluster.request_keys import keys_of, repeatable

TURN = {"role": "user", "content": "the court"}
MORE = [TURN, {"role": "assistant", "content": "said"}, {"role": "user", "content": "more"}]


def read(body: Any, *headers: tuple[bytes, bytes]) -> Any:
    return keys_of(list(headers), body if isinstance(body, bytes) else json.dumps(body).encode())


@pytest.mark.parametrize(
    "more",
    [
        {"messages": MORE},
        {"messages": MORE, "stream": True, "temperature": 0.5},
        {
            "messages": [
                {"content": [{"type": "text", "text": "the court"}], "role": "user"},
                *MORE[1:],
            ]
        },
        {"input": MORE},
    ],
    ids=["chat", "options", "parts", "responses"],
)
def test_the_next_turn_of_a_conversation_shares_its_prefix(more: dict[str, Any]) -> None:
    one, next_ = read({"model": "demo", "messages": [TURN]}), read({"model": "demo", **more})
    assert next_.prefixes[: len(one.prefixes)] == one.prefixes
    assert len(next_.prefixes) == 3
    assert one.model == next_.model == "demo"
    assert one.number < next_.number


def test_a_system_prompt_comes_before_the_messages() -> None:
    found = read({"messages": [TURN], "system": [{"type": "text", "text": "be brief"}]})
    assert found.prefixes == prefixes(["system be brief", "user the court"])
    assert read({"instructions": "be brief", "input": "x"}).prefixes == prefixes(
        ["instructions be brief", "input x"]
    )


def test_a_session_is_the_client_s_choice() -> None:
    assert read({}, (b"X-Session-Id", b"me")).session == "me"
    assert read({"prompt_cache_key": "key"}).session == "key"
    assert read({"prompt_cache_key": "key"}, (b"x-session-id", b"me")).session == "me"
    assert read({"prompt_cache_key": 7}).session == ""


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b"[1]", b'"text"', b"[" * 500, b'{"model": 5, "messages": {"a": [1]}}',
     b'{"messages": [null, 3, {"role": [["x"]]}], "prompt": NaN}'],
)  # fmt: skip
def test_any_body_is_read(body: bytes) -> None:
    found = read(body)
    assert found.model == ""
    assert len(found.prefixes) <= 1


def test_ingress_processes_number_requests_apart() -> None:
    """All ingress read each replica's routing, by these numbers."""
    first = [importlib.reload(request_keys).keys_of([], b"").number for _ in range(2)]
    assert first[0] != first[1]


def test_long_names_are_cut() -> None:
    found = read({"model": "m" * 1000, "prompt_cache_key": "s" * 1000})
    assert (len(found.model), len(found.session)) == (256, 256)


@pytest.mark.parametrize(
    ("method", "path", "again"),
    [
        ("POST", "/api/chat", True),
        ("POST", "/v1/responses", True),
        ("POST", "/api/pull", True),
        ("GET", "/api/tags", True),
        ("DELETE", "/api/delete", False),
        ("DELETE", "/v1/responses/resp_1", False),
        ("POST", "/v1/responses/resp_1/cancel", False),
        ("POST", "/api/copy", False),
        ("POST", "/api/create", False),
        ("POST", "/api/memory", False),
        ("POST", "/api/blobs/sha256:00", False),
    ],
)
def test_only_what_changes_nothing_is_asked_again(method: str, path: str, again: bool) -> None:
    assert repeatable(method, path) is again
