"""Run long work on a thread for one client: its lines are sent as they come, and it ends with it.

The work is told that its client has left. It then raises ClientGone.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from moeinf.runtime.config import Settings
from moeinf.runtime.text.panic import as_exception
from moeinf.server.api.answers import noted
from moeinf.server.api.ollama_api import error_document
from moeinf.server.engines.jobs import Busy
from moeinf.server.http.json_text import Answer, dump

_CLIENT_GONE = 499  # as nginx logs it
_STEPS = 100  # progress lines per phase, at most
_MOST_WAITING = 16  # requests for one kind of work; each has a thread
_LOOK_S = 0.2  # between two checks that the client of waiting work is there

Line = dict[str, Any]


class ClientGone(Exception):
    """The client has left."""


class Client:
    """The connection state of a client. `leave` also ends downloads in flight."""

    def __init__(self, say: Callable[[Line], None]) -> None:
        self.say = say
        self.gone = threading.Event()
        self.stop = threading.Event()  # a pull also sets it when its downloads are complete

    def leave(self) -> None:
        self.gone.set()
        self.stop.set()

    def check(self) -> None:
        """Raise ClientGone if the client has left."""
        if self.gone.is_set():
            raise ClientGone


Work = Callable[[Client], Line]  # sends lines by `say`, and returns the last one


class Progress:
    """Send progress lines as Ollama does: a status, a digest, and bytes in total and completed."""

    def __init__(self, client: Client, digest: str) -> None:
        self._client, self._digest = client, digest
        self._told: dict[str, int] = {}  # phase -> last hundredth sent

    def __call__(self, phase: str, done: int, total: int) -> None:
        self._client.check()
        hundredths = done * _STEPS // max(total, 1)
        if self._told.get(phase) == hundredths:
            return
        self._told[phase] = hundredths
        status = f"pulling {phase}" if phase.endswith(".safetensors") else phase
        about = {"status": status, "digest": self._digest}
        self._client.say({**about, "total": total, "completed": done})


class Turns:
    """Let few clients' work run at a time: more would only take its speed, and more threads."""

    def __init__(self, at_once: int = 1) -> None:
        self._free = threading.Semaphore(at_once)
        self._waiting = threading.Semaphore(_MOST_WAITING)

    @contextmanager
    def turn(self, client: Client) -> Iterator[None]:
        """Wait for the turn. Raises ClientGone, and Busy if too many wait."""
        if not self._waiting.acquire(blocking=False):
            raise Busy(f"{_MOST_WAITING} such requests wait already; try again later")
        try:
            while not self._free.acquire(timeout=_LOOK_S):
                client.check()
        finally:
            self._waiting.release()
        try:
            client.check()
            yield
        finally:
            self._free.release()


async def respond(request: Request, name: str, work: Work, stream: bool) -> Response:
    """Run the work on a thread of this name; send every line, or only the last one.

    An error before the first line is raised, so that it has a status. A later one is a line.
    """
    lines, client = _lines(name, work)
    watch = asyncio.create_task(_leave_when_gone(request, client))
    try:
        last = await anext(lines)
        if not stream:
            async for line in lines:
                last = line
    finally:
        watch.cancel()
    if isinstance(last, ClientGone):
        return Response(status_code=_CLIENT_GONE)  # visible only in a log
    if isinstance(last, Exception):
        raise last
    if stream:
        worded = _worded(last, lines, request.app.state.settings)
        return StreamingResponse(worded, media_type="application/x-ndjson")
    return Answer(last)


async def _leave_when_gone(request: Request, client: Client) -> None:
    """Wait for the client's disconnect, which is not noticed elsewhere before a first line."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    client.leave()


async def _worded(
    first: Line, lines: AsyncIterator[Line | Exception], settings: Settings
) -> AsyncIterator[str]:
    yield dump(first) + "\n"
    async for line in lines:
        if isinstance(line, Exception):
            line = {**error_document(noted(line, settings))}
        yield dump(line) + "\n"


def _lines(name: str, work: Work) -> tuple[AsyncIterator[Line | Exception], Client]:
    """Return the lines, of which the last is the work's result or its exception, and their client.

    The work starts with the first line. It ends soon after the client leaves, or after the end of
    the iterator.
    """
    loop = asyncio.get_running_loop()
    said: asyncio.Queue[Line | Exception | None] = asyncio.Queue()

    def say(line: Line | Exception | None) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(said.put_nowait, line)

    client = Client(say)

    def run() -> None:
        try:
            say(work(client))
        except BaseException as error:  # a Rust panic is not an Exception
            say(as_exception(error))
        finally:
            say(None)

    async def read() -> AsyncIterator[Line | Exception]:
        # A daemon thread: what it has done is kept or harmless, so the server need not wait for it.
        threading.Thread(target=run, name=name, daemon=True).start()
        try:
            while (line := await said.get()) is not None:
                yield line
        finally:
            client.leave()

    return read(), client
