"""Serve `/api/pull`: fetch and repack a model for a client, with Ollama's progress lines.

A pull ends when the client that reads its lines leaves. The fetched bytes are kept, and the next
pull resumes there.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from moeinf.runtime.config import Settings
from moeinf.runtime.library.library import Library
from moeinf.runtime.names import is_path
from moeinf.runtime.text.panic import as_exception
from moeinf.server.api.answers import BadRequest, noted
from moeinf.server.api.ollama_api import error_document
from moeinf.server.api.optional_fields import Said
from moeinf.server.http.bodies import JsonRoute


class ClientGone(Exception):
    """The client of this pull has left."""


class _Client:
    """The connection state of a pull's client. `leave` also ends downloads in flight."""

    def __init__(self) -> None:
        self.gone = threading.Event()
        self.stop = threading.Event()  # the pull also sets it when its downloads are complete

    def leave(self) -> None:
        self.gone.set()
        self.stop.set()


router = APIRouter(route_class=JsonRoute)
_SUCCESS = {"status": "success"}
_CLIENT_GONE = 499  # as nginx logs it
_STEPS = 100  # progress lines per phase, at most

Line = dict[str, Any]


class PullRequest(Said):
    """A pull. Old clients send `name` instead of `model`. `insecure` has no effect here."""

    model: str = ""
    name: str = ""
    insecure: bool = False
    stream: bool = True
    username: str | None = None
    password: str | None = None


@router.post("/api/pull")
async def pull(asked: PullRequest, request: Request) -> Response:
    """Send a line per phase and per hundredth of it; the last line is success or an error."""
    wanted = asked.model or asked.name
    if not wanted:
        raise BadRequest("model is missing")
    if is_path(wanted):
        raise BadRequest("a folder of this machine is pulled with `moeinf pull`, not over HTTP")
    settings = request.app.state.settings
    client = _Client()
    lines = _lines(wanted, settings, client)
    watch = asyncio.create_task(_leave_when_gone(request, client))
    try:
        last = await anext(lines)
        while not asked.stream and not isinstance(last, Exception) and last != _SUCCESS:
            last = await anext(lines)
    finally:
        watch.cancel()
    if isinstance(last, ClientGone):
        return Response(status_code=_CLIENT_GONE)  # visible only in a log
    if isinstance(last, Exception):
        raise last
    if asked.stream:
        worded = _worded(last, lines, settings)
        return StreamingResponse(worded, media_type="application/x-ndjson")
    return JSONResponse(last)


async def _leave_when_gone(request: Request, client: _Client) -> None:
    """Wait for the client's disconnect, which is not noticed elsewhere before a first line."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    client.leave()


async def _worded(
    first: Line, lines: AsyncIterator[Line | Exception], settings: Settings
) -> AsyncIterator[str]:
    yield json.dumps(first) + "\n"
    async for line in lines:
        if isinstance(line, Exception):
            line = {**error_document(noted(line, settings))}
        yield json.dumps(line) + "\n"


async def _lines(
    wanted: str, settings: Settings, client: _Client
) -> AsyncIterator[Line | Exception]:
    """Run a pull on a separate thread and yield its lines; the last is success or an exception.

    The pull ends soon after the client leaves, or after the end of this generator.
    """
    loop = asyncio.get_running_loop()
    said: asyncio.Queue[Line | Exception | None] = asyncio.Queue()

    def say(line: Line | Exception | None) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(said.put_nowait, line)

    def run() -> None:
        try:
            _pull(wanted, settings, say, client)
            say(_SUCCESS)
        except BaseException as error:  # a Rust panic is not an Exception
            say(as_exception(error))
        finally:
            say(None)

    # A daemon thread: fetched bytes are kept, so that the server need not wait for its end.
    threading.Thread(target=run, name=f"pull {wanted[:40]}", daemon=True).start()
    try:
        while (line := await said.get()) is not None:
            yield line
    finally:
        client.leave()


def _pull(wanted: str, settings: Settings, say: Callable[[Line], None], client: _Client) -> None:
    from moeinf.runtime.hub.resolve import find_source
    from moeinf.runtime.library.repack import repack  # imports torch

    def note(text: str) -> None:
        say({"status": text})

    name, source = find_source(wanted, None, settings, note, stop=client.stop)
    note("pulling manifest")
    library = Library(settings)
    progress = _Progress(say, client.gone, source.revision or str(name))
    if library.made_of(name, source.origin, source.revision) is None:
        repack(source, library, name, progress, note)
    else:
        note(f"{name} is up to date")


class _Progress:
    """Send progress lines as Ollama does: a status, a digest, and bytes in total and completed."""

    def __init__(self, say: Callable[[Line], None], gone: threading.Event, digest: str) -> None:
        self._say, self._gone, self._digest = say, gone, digest
        self._told: dict[str, int] = {}  # phase -> last hundredth sent

    def __call__(self, phase: str, done: int, total: int) -> None:
        if self._gone.is_set():
            raise ClientGone
        hundredths = done * _STEPS // max(total, 1)
        if self._told.get(phase) == hundredths:
            return
        self._told[phase] = hundredths
        status = f"pulling {phase}" if phase.endswith(".safetensors") else phase
        self._say({"status": status, "digest": self._digest, "total": total, "completed": done})
