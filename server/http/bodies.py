"""Limits of request bodies: size, time to arrive, and the memory of all together.

A body counts from its first bytes until its request has been answered. The objects and lists that
are parsed from it count too: they may take 65 times its length.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from moeinf.runtime.library.blobs import MOST_BLOB_BYTES
from moeinf.runtime.request_json import BadJson, parse
from moeinf.server.http.refusals import BadBody, BodiesTooLong, BodyLate, BodyTooLong

MOST_BODY_BYTES = 8 << 20
BODY_SECONDS = 60.0  # for all of a request's body to arrive; of an upload, for each part of it
UPLOADS = "/api/blobs/"  # the path of files, which are streamed to the disk
ALL_BODIES_BYTES = 64 << 20
FREE_BYTES = 64 << 10  # of each body: short requests are taken despite long ones
FREE_CONTAINERS, CONTAINER_BYTES = 128, 1 << 10  # objects and lists, checked and rendered
_MOST_CONTAINERS_BYTES = ALL_BODIES_BYTES - MOST_BODY_BYTES  # one body alone is always taken


def most_bytes(method: str, path: str) -> int:
    """Return the most bytes of a request's body."""
    is_upload = method == "POST" and path.startswith(UPLOADS)
    return MOST_BLOB_BYTES if is_upload else MOST_BODY_BYTES


class Budget:
    """The bytes that bodies hold now, each beyond FREE_BYTES and FREE_CONTAINERS."""

    def __init__(self) -> None:
        self.held_bytes = 0

    def take(self, count: int) -> bool:
        """Return whether there was room."""
        if self.held_bytes + count > ALL_BODIES_BYTES:
            return False
        self.held_bytes += count
        return True

    def give_back(self, count: int) -> None:
        self.held_bytes -= count


class Body:
    """A request's body as it arrives. `close` when the request has been answered."""

    def __init__(self, receive: Any, budget: Budget, most: int = MOST_BODY_BYTES) -> None:
        """Take a request's messages. most: bytes; more than MOST_BODY_BYTES: it is streamed."""
        self._receive, self._budget, self._most = receive, budget, most
        self._bytes = self._taken = 0
        self._deadline = asyncio.get_running_loop().time() + BODY_SECONDS
        self._whole = False

    async def receive(self) -> Any:
        """Return the next message. Raises BodyLate, BodyTooLong, BodiesTooLong."""
        if self._whole:  # the next message reports that the client has gone
            return await self._receive()
        try:
            if self._streamed:
                self._deadline = asyncio.get_running_loop().time() + BODY_SECONDS
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError as error:
            raise BodyLate("the body did not arrive in time") from error
        if message["type"] == "http.request":
            self._bytes += len(message.get("body", b""))
            self._whole = not message.get("more_body", False)
            self._count()
        return message

    @property
    def _streamed(self) -> bool:
        return self._most > MOST_BODY_BYTES

    def admit(self, containers: int) -> None:
        """Count the objects and lists that are about to be parsed. Raises BodiesTooLong."""
        beyond = max(0, containers - FREE_CONTAINERS) * CONTAINER_BYTES
        self._take(min(beyond, _MOST_CONTAINERS_BYTES))

    def hold(self, count: int) -> None:
        """Count bytes that are read for the request besides its body. Raises BodiesTooLong."""
        self._take(count)

    def close(self) -> None:
        self._budget.give_back(self._taken)
        self._taken = 0

    def _count(self) -> None:
        if self._bytes > self._most:
            raise BodyTooLong(f"the body must have at most {self._most} bytes")
        if not self._streamed:
            self._take(max(0, self._bytes - FREE_BYTES) - self._taken)

    def _take(self, more: int) -> None:
        if not self._budget.take(more):
            words = "the bodies of all requests are too long together: try again"
            raise BodiesTooLong(words, {"Retry-After": "1"})
        self._taken += more


class JsonRequest(Request):
    """A request whose JSON is bounded before it is parsed. The Guard gives its state a Body."""

    async def json(self) -> Any:
        """Return the body's value. Raises BadBody and what Body raises."""
        body = await self.body()
        try:
            text = body.decode(json.detect_encoding(body), "surrogatepass")
            return parse(text, self.state.body.admit)
        except UnicodeDecodeError as error:
            raise BadBody("the body is not text in UTF-8") from error
        except BadJson as error:
            raise BadBody(str(error)) from error


class JsonRoute(APIRoute):
    """A route that parses its body with JsonRequest."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_bounded(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_bounded
