"""Limits of request bodies: size, time to arrive, and the memory of all together.

A body counts from its first bytes until its request has been answered. The objects and lists that
are parsed from it count too: they may take 65 times its length.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from moeinf.runtime.library.blobs import MOST_BLOB_BYTES
from moeinf.runtime.request_json import BadJson, count_containers, load
from moeinf.server.http.refusals import BadBody, BodiesTooLong, BodyLate, BodyTooLong

MOST_BODY_BYTES = 8 << 20
BODY_SECONDS = 60.0  # for all of a request's body to arrive; of an upload, for each part of it
UPLOADS = "/api/blobs/"  # the path of files, which are streamed to the disk
ALL_BODIES_BYTES = 64 << 20
FREE_BYTES = 64 << 10  # of each body: short requests are taken despite long ones
FREE_CONTAINERS, CONTAINER_BYTES = 128, 1 << 10  # objects and lists, checked and rendered
_MOST_CONTAINERS_BYTES = ALL_BODIES_BYTES - MOST_BODY_BYTES  # one body alone is always taken

_PARSING = ThreadPoolExecutor(2, "parsing")
_T = TypeVar("_T")


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
    def long(self) -> bool:
        """True if the body is parsed off the event loop."""
        return self._bytes > FREE_BYTES

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

    def __init__(self, scope: Any, receive: Any, field: Any = None) -> None:
        """field: of the endpoint that the body is for; None: the value is not checked."""
        super().__init__(scope, receive)
        self._field = field

    async def json(self) -> Any:
        """Return the body's value, checked if the body is long.

        Raises BadBody, what Body raises, and InvalidBody.
        """
        body = await self.body()
        try:
            text, containers = await aside(self, _read, body)
            self.state.body.admit(containers)
            return await aside(self, self._load, text)
        except UnicodeDecodeError as error:
            raise BadBody("the body is not text in UTF-8") from error
        except BadJson as error:
            raise BadBody(str(error)) from error

    def _load(self, text: str) -> Any:
        value = load(text)
        if self._field is None or not self.state.body.long:
            return value
        checked, errors = self._field.validate(value, {}, loc=("body",))
        if errors:
            raise InvalidBody(errors)
        return checked


class InvalidBody(HTTPException):
    """The fields of a long body are invalid. FastAPI passes on errors of this kind alone."""

    def __init__(self, errors: Sequence[Any]) -> None:
        super().__init__(400)
        self.errors = errors


class JsonRoute(APIRoute):
    """A route that parses its body with JsonRequest."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        field = self.body_field if self.dependant.body_params == [self.body_field] else None

        async def handle_bounded(request: Request) -> Response:
            try:
                return await handle(JsonRequest(request.scope, request.receive, field))
            except InvalidBody as error:
                raise RequestValidationError(error.errors) from error

        return handle_bounded


async def aside(request: Request, work: Callable[..., _T], *args: Any) -> _T:
    """Return what `work` returns. It runs in a thread if the request's body is long."""
    return await in_thread(work, *args) if request.state.body.long else work(*args)


async def in_thread(work: Callable[..., _T], *args: Any) -> _T:
    """Return what `work` returns, from a thread that only parses and writes texts."""
    return await asyncio.get_running_loop().run_in_executor(_PARSING, work, *args)


def _read(body: bytes) -> tuple[str, int]:
    """Return a body's text, and the number of its objects and lists."""
    text = body.decode(json.detect_encoding(body), "surrogatepass")
    return text, count_containers(text)
