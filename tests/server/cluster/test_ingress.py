"""Test the ingress of a cluster without a cluster: what it refuses, and replicas that are lost."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import warnings
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn

from moeinf.runtime.config import ServerSettings
from moeinf.server.http.bodies import MOST_BODY_BYTES

pytest.importorskip("ray", reason="needs pip install 'moeinf[cluster]'")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    from ray.exceptions import RayActorError

    from moeinf.server.cluster.ingress import Ingress
UPLOAD = "/api/blobs/sha256:" + "0" * 64


Step = float | Exception | dict[str, Any]


class Answer:
    """A replica's messages; a number is a pause in seconds, an exception its end."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        for step in self._steps:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, float):
                await asyncio.sleep(step)
            else:
                yield step

    def cancel(self) -> None:
        """Do nothing: it has ended."""


def ingress_of(*answers: Sequence[Step], retry: bool = False) -> tuple[Ingress, list[Any]]:
    """Return an ingress whose replicas answer so, in turn, and the requests they got."""
    asked = list[Any]()

    def remote(scope: Any, *_: Any, **__: Any) -> Answer:
        asked.append(scope["path"])
        return Answer(answers[min(len(asked), len(answers)) - 1])

    handle = SimpleNamespace(answer=SimpleNamespace(remote=remote))
    given: Any = SimpleNamespace(options=lambda **_: handle)
    return Ingress(given, ServerSettings(), retry), asked


def begun(kind: bytes, *headers: tuple[bytes, bytes]) -> Step:
    head = [(b"content-type", kind), *headers]
    return {"type": "http.response.start", "status": 200, "headers": head}


def part(data: bytes, more: bool = True) -> Step:
    return {"type": "http.response.body", "body": data, "more_body": more}


def scope_of(method: str, path: str, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(),
        "query_string": b"", "http_version": "1.1", "headers": [(b"host", b"localhost"), *headers],
    }  # fmt: skip


def answered(ingress: Ingress, method: str, path: str) -> tuple[int, bytes]:
    """Return the status and the body that a client gets, who waits for the end."""
    sent, parts = list[Any](), [{"type": "http.request", "body": b"{}"}]

    async def receive() -> dict[str, Any]:
        if not parts:
            await asyncio.Event().wait()
        return parts.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(ingress(scope_of(method, path), receive, send))
    assert [one["type"] for one in sent].count("http.response.start") == 1
    assert [one.get("more_body", False) for one in sent[1:]].count(False) == 1
    return sent[0]["status"], b"".join(one["body"] for one in sent[1:])


@pytest.mark.parametrize("length", [[], [(b"content-length", b"%d" % (1 << 40))]])
def test_an_upload_is_refused_before_it_fills_the_memory(
    length: list[tuple[bytes, bytes]],
) -> None:
    """The ingress holds a whole body, to send it again. An upload may have a TiB elsewhere."""
    taken, sent = list[int](), list[Any]()

    async def receive() -> dict[str, Any]:
        if sum(taken) >= 2 * MOST_BODY_BYTES:
            return {"type": "http.disconnect"}
        taken.append(1 << 20)
        more = sum(taken) < 2 * MOST_BODY_BYTES
        return {"type": "http.request", "body": bytes(1 << 20), "more_body": more}

    async def send(message: Any) -> None:
        sent.append(message)

    ingress, asked = ingress_of([])
    asyncio.run(ingress(scope_of("POST", UPLOAD, *length), receive, send))
    assert sent[0]["status"] == 413
    assert json.loads(sent[1]["body"])["code"] == "body_too_long"
    assert asked == []
    assert sum(taken) <= MOST_BODY_BYTES + (1 << 20)


def test_a_replica_that_ends_after_its_answer_breaks_no_connection() -> None:
    """Its error comes while the client sends the next request on the same connection."""
    ingress, _ = ingress_of([
        0.1, begun(b"application/x-ndjson", (b"transfer-encoding", b"chunked")),
        part(b"{}\n"), part(b"", more=False), 0.05, RayActorError(),
    ])  # fmt: skip
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(ingress, log_config=None))
    thread = threading.Thread(target=lambda: server.run(sockets=[listening]))
    thread.start()
    try:
        port = listening.getsockname()[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            found = [client.post("/api/generate", json={"model": "x"}).text for _ in range(2)]
    finally:
        server.should_exit = True
        thread.join()
    assert found == ["{}\n"] * 2


@pytest.mark.parametrize(
    ("method", "path", "times"),
    [("POST", "/api/chat", 2), ("POST", "/api/copy", 1), ("DELETE", "/api/delete", 1)],
)
def test_a_request_that_may_have_been_done_is_not_done_twice(
    method: str, path: str, times: int
) -> None:
    ingress, asked = ingress_of([RayActorError()], [begun(b"application/json"), part(b"{}", False)])
    status, body = answered(ingress, method, path)
    assert len(asked) == times
    if times == 2:
        assert (status, body) == (200, b"{}")
    else:
        assert (status, json.loads(body)["code"]) == (503, "replica_lost")


def test_replicas_that_all_end_are_not_asked_for_ever() -> None:
    ingress, asked = ingress_of([RayActorError()])
    status, body = answered(ingress, "POST", "/v1/chat/completions")
    assert (status, json.loads(body)["error"]["code"]) == (503, "replica_lost")
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("path", "line", "lead"),
    [
        ("/api/generate", b'{"response": "a"}\n', ""),
        ("/v1/completions", b'data: {"choices": [{"text": "a"}]}\n\n', "data: "),
        ("/v1/messages", b'data: {"delta": {"text": "a"}}\n\n', "event: error\ndata: "),
    ],
)
@pytest.mark.parametrize("retry", [False, True])
def test_a_stream_that_breaks_ends_by_an_error_in_the_form_of_its_api(
    path: str, line: bytes, lead: str, retry: bool
) -> None:
    """With retry: another replica begins with another text, as without a seed."""
    kind = b"application/x-ndjson" if path.startswith("/api/") else b"text/event-stream"
    other = line.replace(b'"a"', b'"b"')
    ingress, asked = ingress_of(
        [begun(kind), part(line), RayActorError()],
        [begun(kind), part(other), part(b"", False)],
        retry=retry,
    )
    status, body = answered(ingress, "POST", path)
    assert (status, len(asked)) == (200, 1 + retry)
    assert body.startswith(line)
    last = body.removeprefix(line).decode().strip()
    assert last.startswith(lead)
    error = json.loads(last.removeprefix(lead))
    assert "replica_lost" in json.dumps(error)
    assert "error" in error


def test_a_stream_goes_on_at_another_replica() -> None:
    kind, lines = b"application/x-ndjson", [b'{"response": "%c"}\n' % word for word in b"abc"]
    ingress, _ = ingress_of(
        [begun(kind), part(lines[0] + lines[1][:9]), RayActorError()],
        [begun(kind), *map(part, lines), part(b"", False)],
        retry=True,
    )
    assert answered(ingress, "POST", "/api/generate") == (200, b"".join(lines))
