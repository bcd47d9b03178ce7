"""Be the HTTP ingress of a cluster: check a request, send it to a replica, return its answer.

An ASGI application. It has the checks of a single server (Guard) and no engine. A replica that dies
before it has sent anything costs nothing: another one gets the request. In the middle of a stream
the client gets an error in the form of its API. With `retry` another replica computes the
answer again, and the client gets the rest of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from ray.exceptions import RayActorError, RayError, TaskCancelledError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from moeinf.errors import MoeinfError, as_moeinf
from moeinf.runtime.config import ServerSettings
from moeinf.server.api.messages.answer import RequestIds
from moeinf.server.app import document_of
from moeinf.server.cluster.failures import ReplicaLost
from moeinf.server.cluster.request_keys import keys_of, repeatable
from moeinf.server.cluster.resumed import Differs, Resumable
from moeinf.server.cluster.routing_counts import RoutingCounts
from moeinf.server.http.json_text import dump
from moeinf.server.http.security import Guard

_TRIES = 3
_PASSED_ON = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string",
              "root_path", "headers", "client", "server", "asgi")  # fmt: skip


class Ingress:
    """Pass requests to the replicas behind `handle`. `state` is what serve.py asks an app for."""

    def __init__(self, handle: DeploymentHandle, server: ServerSettings, retry: bool) -> None:
        self._handle = handle.options(stream=True)
        self._retry = retry
        guard = Guard(self._pass, settings=server, document=document_of, uploads=False)
        self._guarded = RequestIds(guard)
        self._registry = CollectorRegistry()
        self._registry.register(RoutingCounts())
        self.state = SimpleNamespace(host=SimpleNamespace(in_use=True, stuck=False, failure=""))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            await self._guarded(scope, receive, send)

    async def _pass(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/metrics":
            await _answer(send, 200, b"text/plain; version=0.0.4", generate_latest(self._registry))
            return
        held = bytearray()
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                held += message.get("body", b"")
                if not message.get("more_body", False):
                    break
        except MoeinfError as error:
            await _refuse(scope, send, error)
            return
        passing = _Passing(send)
        answering = asyncio.create_task(self._relay(scope, bytes(held), passing))
        watching = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() and not passing.whole:
                answering.cancel()  # the client has gone: this cancels the replica's request
            with suppress(asyncio.CancelledError):
                await answering
        finally:
            watching.cancel()
            answering.cancel()

    async def _relay(self, scope: Any, body: bytes, send: _Passing) -> None:
        """Send the answer of one replica, or of the next one where it ends too soon.

        The last message waits until Ray has counted the request as ended. So the client's next
        request is routed by the load without this one. A replica that ends meanwhile loses nothing.
        """
        keys = keys_of(scope["headers"], body)
        passed = {name: scope[name] for name in _PASSED_ON if name in scope}
        lines, started, streams, tries = Resumable(), False, False, 0
        last: Any = None
        while True:
            tries += 1
            try:
                async for message in self._messages(passed, body, keys):
                    if message["type"] == "http.response.start":
                        if not started:
                            started, streams = True, _is_stream(message)
                            await send(message)
                        continue
                    more = message.get("more_body", False)
                    data = message.get("body", b"")
                    if self._retry and streams:
                        data = lines.take(data, last=not more)
                    if not more:
                        last = {**message, "body": data}
                    elif data:
                        await send({**message, "body": data})
            except (RayActorError, RayServeException):
                if last is not None:
                    break
                lost = ReplicaLost("the replica that answered has ended")
                again = repeatable(scope["method"], scope["path"])
                if again and tries < _TRIES and (not started or (self._retry and streams)):
                    lines.restart()
                    continue
                await _break(scope, send, lost, started)
                return
            except Differs as error:
                await _break(scope, send, ReplicaLost(str(error)), started)
                return
            except (RayError, MoeinfError) as error:
                if last is None:
                    await _break(scope, send, as_moeinf(error), started)
                    return
            break
        if last is not None:
            await send(last)

    async def _messages(self, scope: Any, body: bytes, keys: Any) -> AsyncIterator[Any]:
        stream = self._handle.answer.remote(scope, body, keys=keys)
        ended = False
        try:
            async for message in stream:
                yield message
            ended = True
        except TaskCancelledError as error:
            raise asyncio.CancelledError from error
        finally:
            if not ended:
                stream.cancel()


class _Passing:
    """Sends messages to the client, and notes that the answer is whole."""

    def __init__(self, send: Any) -> None:
        self._send, self.whole = send, False

    async def __call__(self, message: Any) -> None:
        body = message["type"] == "http.response.body"
        self.whole = body and not message.get("more_body", False)
        await self._send(message)


def _is_stream(message: Any) -> bool:
    """Return whether an answer is a stream of lines."""
    kinds = [value for name, value in message["headers"] if name.lower() == b"content-type"]
    return any(kind.startswith((b"text/event-stream", b"application/x-ndjson")) for kind in kinds)


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _live(receive: Any, send: Any) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


async def _break(scope: Any, send: Any, told: MoeinfError, started: bool) -> None:
    """End an answer by an error: a document, or the last line of a stream."""
    if not started:
        await _refuse(scope, send, told)
        return
    path, line = scope["path"], dump(document_of(scope, told)).encode()
    if path.startswith("/v1/messages"):
        line = b"event: error\ndata: " + line + b"\n"
    elif path.startswith("/v1/"):
        line = b"data: " + line + b"\n"
    await send({"type": "http.response.body", "body": b"\n" + line + b"\n", "more_body": False})


async def _refuse(scope: Any, send: Any, error: MoeinfError) -> None:
    body = dump(document_of(scope, error)).encode()
    await _answer(send, error.http_status, b"application/json", body)


async def _answer(send: Any, status: int, kind: bytes, body: bytes) -> None:
    headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
