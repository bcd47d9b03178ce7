"""Test the doors of a cluster without a cluster: what they refuse before any replica is asked."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import warnings
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn

from moeinf.runtime.config import ServerSettings
from moeinf.server.http.bodies import MOST_BODY_BYTES

pytest.importorskip("ray", reason="needs pip install 'moeinf[cluster]'")
UPLOAD = "/api/blobs/sha256:" + "0" * 64


@pytest.mark.parametrize("length", [[], [(b"content-length", b"%d" % (1 << 40))]])
def test_an_upload_is_refused_before_it_fills_the_memory(
    length: list[tuple[bytes, bytes]],
) -> None:
    """The doors hold a whole body, to send it again. An upload may have a TiB elsewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        from moeinf.server.cluster.doors import Doors
    asked, taken, sent = list[Any](), list[int](), list[Any]()

    async def receive() -> dict[str, Any]:
        if sum(taken) >= 2 * MOST_BODY_BYTES:
            return {"type": "http.disconnect"}
        taken.append(1 << 20)
        more = sum(taken) < 2 * MOST_BODY_BYTES
        return {"type": "http.request", "body": bytes(1 << 20), "more_body": more}

    async def send(message: Any) -> None:
        sent.append(message)

    handle = SimpleNamespace(answer=SimpleNamespace(remote=lambda *a, **_: asked.append(a)))
    given: Any = SimpleNamespace(options=lambda **_: handle)
    doors = Doors(given, ServerSettings(), False)
    scope = {
        "type": "http", "method": "POST", "path": UPLOAD, "raw_path": UPLOAD.encode(),
        "query_string": b"", "http_version": "1.1", "headers": [(b"host", b"localhost"), *length],
    }  # fmt: skip
    asyncio.run(doors(scope, receive, send))
    assert sent[0]["status"] == 413
    assert json.loads(sent[1]["body"])["code"] == "body_too_long"
    assert asked == []
    assert sum(taken) <= MOST_BODY_BYTES + (1 << 20)


def test_a_replica_that_ends_after_its_answer_breaks_no_connection() -> None:
    """Its error comes while the client sends the next request on the same connection."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        from ray.exceptions import RayActorError

        from moeinf.server.cluster.doors import Doors

    class Answer:
        """A stream that is whole, and then breaks."""

        async def messages(self) -> AsyncIterator[dict[str, Any]]:
            head = [(b"content-type", b"application/x-ndjson"), (b"transfer-encoding", b"chunked")]
            await asyncio.sleep(0.1)
            yield {"type": "http.response.start", "status": 200, "headers": head}
            yield {"type": "http.response.body", "body": b"{}\n", "more_body": True}
            yield {"type": "http.response.body", "body": b"", "more_body": False}
            await asyncio.sleep(0.05)
            raise RayActorError

        def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
            return self.messages()

        def cancel(self) -> None:
            """Do nothing: it has ended."""

    handle = SimpleNamespace(answer=SimpleNamespace(remote=lambda *a, **_: Answer()))
    given: Any = SimpleNamespace(options=lambda **_: handle)
    listening = socket.create_server(("127.0.0.1", 0))
    doors = Doors(given, ServerSettings(), False)
    server = uvicorn.Server(uvicorn.Config(doors, log_config=None))
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
