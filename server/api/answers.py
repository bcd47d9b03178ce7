"""Pass a job's events from the engine's thread to the event loop, and word its errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

from fastapi import Request

from moeinf.errors import InternalError, MoeinfError, as_moeinf
from moeinf.runtime.config import Settings
from moeinf.runtime.crash_log import note_bug
from moeinf.runtime.generation.events import Ended, Event, Failed
from moeinf.runtime.invalid import InvalidValue
from moeinf.server.engines.jobs import Busy, Job, Unloaded
from moeinf.server.engines.model_manager import Loaded
from moeinf.server.http.request_log import notes_of
from moeinf.server.metrics import Metrics

_MOST_WORDS = 2000  # characters: a request's names may have any length


class BadRequest(InvalidValue):
    """A request is malformed, or requests something impossible."""

    code = "bad_request"

    def __init__(self, words: str, field: str | None = None) -> None:
        """field: the field of the request that is invalid, if there is one."""
        super().__init__(words)
        self.field = field


def words_of(error: MoeinfError) -> str:
    """Return the message of an error, and its hint for the server's operator."""
    words = str(error)[:_MOST_WORDS]
    return f"{words}: {error.serve_hint}" if error.serve_hint else words


def noted(error: Exception, settings: Settings) -> MoeinfError:
    """Return the error to be shown; keep the traceback of a bug."""
    told = as_moeinf(error)
    if isinstance(told, InternalError):
        note_bug(settings, error)
    return told


async def events(loaded: Loaded, job: Job, request: Request) -> AsyncGenerator[Event]:
    """Submit the job and yield its events. Leaving early, or the client's leaving, cancels it.

    It sets job.emit. Raises Busy or Unloaded when the worker refuses the job. Raises the error of
    a Failed that comes first, so that a status can still report it.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Event] = asyncio.Queue()
    metrics: Metrics = request.app.state.metrics
    count = metrics.watch(loaded, job)

    def emit(event: Event) -> None:
        count(event)
        with suppress(RuntimeError):  # the loop has ended, and with it the listener
            loop.call_soon_threadsafe(queue.put_nowait, event)

    job.emit = emit
    try:
        loaded.worker.submit(job)
    except (Busy, Unloaded) as error:
        count(Failed(error))
        raise
    watch = asyncio.create_task(_cancel_when_gone(request, job))
    try:
        while True:
            event = await queue.get()
            if isinstance(event, Ended):
                notes_of(request).count(event.prompt_tokens, event.tokens)
            yield event
            if isinstance(event, Ended | Failed):
                return
    finally:
        watch.cancel()
        job.cancelled.set()


async def _cancel_when_gone(request: Request, job: Job) -> None:
    """Cancel the job when the client hangs up, which nothing else notices before output."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    job.cancelled.set()
