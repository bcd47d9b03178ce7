"""Count an answer's bytes until they are written, and drop readers that take nothing.

A whole answer lies in memory until its reader takes it. It counts in the budget of bodies, beyond
FREE_BYTES, and reaches the socket in pieces. So a connection buffers no more than two pieces.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from moeinf.server.http.bodies import ALL_BODIES_BYTES, FREE_BYTES, MOST_BODY_BYTES, Budget

READ_SECONDS = 60.0  # in which a reader takes some of an answer
_LOOKS = 12  # in this time
_PIECE_BYTES = 64 << 10
_MOST_COUNTED = ALL_BODIES_BYTES - MOST_BODY_BYTES  # one answer alone is always sent
_LOOK_S = 0.05  # between two checks that a part of a stream has room


class AnswerBytes:
    """The sending of one answer. `close` when it has been sent, or its client has left.

    refuse: sends a refusal in the place of an answer for which the budget has no room.
    """

    def __init__(
        self, send: Any, budget: Budget, refuse: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        self._send, self._budget, self._refuse = send, budget, refuse
        self._taken = 0
        self._refused = self._whole = False

    async def send(self, message: Any) -> None:
        """Send an ASGI message; nothing follows a refusal."""
        if self._refused:
            return
        if message["type"] == "http.response.start":
            headers = {name.lower(): value for name, value in message.get("headers", ())}
            self._whole = b"content-length" in headers
            if self._whole and not self._take(int(headers[b"content-length"])):
                self._refused = True
                await self._refuse()
                return
            await self._send(message)
        elif message["type"] == "http.response.body":
            await self._body(message, message.get("body", b""))
        else:
            await self._send(message)

    def close(self) -> None:
        self._budget.give_back(self._taken)
        self._taken = 0

    def _take(self, size: int) -> bool:
        count = min(max(0, size - FREE_BYTES), _MOST_COUNTED)
        if not self._budget.take(count):
            return False
        self._taken += count
        return True

    async def _body(self, message: Any, body: bytes) -> None:
        while not self._whole and not self._take(len(body)):
            await asyncio.sleep(_LOOK_S)  # until readers of other answers take them or are dropped
        more = message.get("more_body", False)
        for at in range(0, max(len(body), 1), _PIECE_BYTES):
            piece = body[at : at + _PIECE_BYTES]
            follows = more or at + _PIECE_BYTES < len(body)
            await self._send({**message, "body": piece, "more_body": follows})
        if not self._whole:
            self.close()


class WatchedReader(H11Protocol):
    """Drop a connection whose reader takes nothing of an answer for READ_SECONDS."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._resumed = self._looks = 0
        self._seen = (0, 0)
        self._look = self.loop.call_later(READ_SECONDS / _LOOKS, self._watch)

    def resume_writing(self) -> None:
        self._resumed += 1
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._look.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        now = (waiting, self._resumed)
        self._looks = self._looks + 1 if waiting and now == self._seen else 0
        self._seen = now
        if self._looks >= _LOOKS:
            self.transport.abort()
        else:
            self._look = self.loop.call_later(READ_SECONDS / _LOOKS, self._watch)
