"""Run the application on a socket, with the deadlines and limits that uvicorn lacks.

h11 parses requests, because it bounds their headers.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import h11
import uvicorn

from moeinf.errors import MoeinfError, Unavailable, problem
from moeinf.native import end_after_signals
from moeinf.runtime.config import EngineConfig, ServerSettings, Settings
from moeinf.runtime.machine.memory import keep_heap_small
from moeinf.runtime.server_log import keep_small
from moeinf.runtime.system import raise_descriptor_limit
from moeinf.server.api.answers import BadRequest
from moeinf.server.app import create_app
from moeinf.server.http.answer_bytes import WatchedReader
from moeinf.server.http.listener import Listener
from moeinf.server.http.log_lines import log_config
from moeinf.server.http.refusals import HeadersTooLong
from moeinf.server.http.security import HEADER_BYTES

HEADER_SECONDS = 10.0  # for the line and the headers of a request to arrive
MOST_CONNECTIONS = 1024  # and half of the descriptors; files of experts have a quarter
_GOODBYE_SECONDS = 5
_END_SECONDS = 9.0  # from the first signal to the forced end of the process


class CannotListen(Unavailable, OSError):
    """The address is in use, or does not belong to this machine."""

    code = "cannot_listen"
    hint = "`moeinf stop --all`, which stops your server, or `moeinf serve --port N`"


class Deadlines(WatchedReader):
    """Close a connection when a request's headers are not complete in HEADER_SECONDS.

    heard_at: when its last bytes came, by the loop's clock.
    """

    @property
    def waits(self) -> bool:
        """True if the connection has no request in progress."""
        busy = self.cycle is not None and not self.cycle.response_complete
        return not busy and not self.transport.is_closing()

    def connection_made(self, transport: Any) -> None:
        self.heard_at = self.loop.time()
        super().connection_made(transport)
        self._deadline: asyncio.TimerHandle | None = None
        self._await_request()

    def data_received(self, data: bytes) -> None:
        self.heard_at = self.loop.time()
        super().data_received(data)
        busy = self.cycle is not None and not self.cycle.response_complete
        if busy and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        elif not busy and self._deadline is None:
            self._await_request()

    def send_400_response(self, msg: str) -> None:
        """Answer an invalid request. Called while h11's error is handled."""
        error: MoeinfError = BadRequest(msg)
        if getattr(sys.exception(), "error_status_hint", 400) == HeadersTooLong.http_status:
            words = f"the request line and headers must have at most {HEADER_BYTES} bytes"
            error = HeadersTooLong(words)
        body = json.dumps({"error": str(error), "code": error.code}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=error.http_status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _await_request(self) -> None:
        self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)


class _Server(uvicorn.Server):
    """A server that ends in time after SIGINT or SIGTERM, whatever its threads do.

    unused_s: it also ends after this time without a loaded model and without a request. A finite
    value means that it runs in the background, with a log as its standard error.
    """

    def __init__(self, config: uvicorn.Config, unused_s: float) -> None:
        super().__init__(config)
        self._unused_s = unused_s
        self._requests = 0
        self._used = time.monotonic()

    async def on_tick(self, counter: int) -> bool:
        """Return True when the server must end. Called ten times a second."""
        if self._unused_s == math.inf:
            return await super().on_tick(counter)
        if counter % 10 == 0:
            keep_small(2)
        return await super().on_tick(counter) or self._unused()

    def make_room(self) -> bool:
        """Close the connection that has waited longest for a request; False: all have one."""
        connections = cast("set[Deadlines]", self.server_state.connections)
        waiting = [one for one in connections if one.waits]
        if waiting:
            min(waiting, key=lambda one: one.heard_at).transport.abort()
        return bool(waiting)

    def _unused(self) -> bool:
        state = self.server_state
        in_use = bool(state.tasks) or self.config.app.state.host.in_use  # type: ignore[union-attr]
        if in_use or state.total_requests != self._requests:
            self._requests, self._used = state.total_requests, time.monotonic()
        return time.monotonic() - self._used >= self._unused_s

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        with super().capture_signals():
            if threading.current_thread() is threading.main_thread():
                end_after_signals(_END_SECONDS)
            yield


def make_server(
    settings: Settings,
    server: ServerSettings,
    config: EngineConfig,
    tell: Callable[[str], None] = lambda _: None,
    unused_s: float = math.inf,
    app: Any = None,
) -> _Server:
    """Build a server that does not run yet. Port 0 means any free port.

    tell: see ModelManager. unused_s: see _Server. app: the application; None: one with engines.
    """
    keep_heap_small()  # before the first thread starts
    return _Server(
        uvicorn.Config(
            app or create_app(settings, server, config, tell),
            host=server.host,
            port=server.port,
            http=Deadlines,
            ws="none",
            log_level="warning",
            log_config=log_config(),
            access_log=False,
            h11_max_incomplete_event_size=HEADER_BYTES,
            limit_concurrency=MOST_CONNECTIONS,
            loop="asyncio",  # others do not accept through a Listener
            timeout_graceful_shutdown=_GOODBYE_SECONDS,
            server_header=False,
        ),
        unused_s,
    )


def run_server(
    settings: Settings,
    server: ServerSettings,
    config: EngineConfig,
    listening: Callable[[str], None],
    tell: Callable[[str], None],
    unused_s: float = math.inf,
    app: Any = None,
) -> None:
    """Serve until SIGINT or SIGTERM, or until unused for `unused_s`. Raises CannotListen.

    listening: receives the address. tell: receives the choices and problems of engines. app: see
    make_server.
    """
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    most = min(MOST_CONNECTIONS - 1, raise_descriptor_limit() // 2)
    with Listener(family, most) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((server.host, server.port))
        except OSError as error:
            where = _address(server.host, server.port)
            raise CannotListen(f"cannot listen on {where}: {problem(error)}") from error
        sock.listen()  # connections wait from now on, and are not refused
        listening(_address(*sock.getsockname()[:2]))
        running = make_server(settings, server, config, tell, unused_s, app)
        sock.make_room = running.make_room
        try:
            running.run(sockets=[sock])
        finally:
            if running.config.app.state.host.stuck:  # type: ignore[union-attr]
                os._exit(1)  # Python's own exit would wait for the native call, or crash in it


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
