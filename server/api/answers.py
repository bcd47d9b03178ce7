"""From a job on an engine's thread to events in the event loop, and errors as HTTP statuses.

Does not know which API is spoken.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

from fastapi import Request

from moeinf.runtime.config import Settings
from moeinf.runtime.crash_log import note_bug
from moeinf.runtime.invalid import InvalidValue
from moeinf.server.engines.jobs import Busy, Ended, Event, Failed, Job, Unloaded
from moeinf.server.engines.model_manager import Loaded
from moeinf.server.metrics import Metrics

_STATUS = {
    "NoSuchModel": 404,
    "RepositoryError": 404,
    "BadName": 400,
    "PromptTooLong": 400,
    "ContextFull": 400,
    "TemplateError": 400,
    "TokenizerFailed": 400,
    "InvalidValue": 400,
    "BadFormat": 400,
    "BadRequest": 400,
    "UnknownSource": 404,
    "DownloadFailed": 503,
    "ModelInUse": 409,
    "ModelExists": 409,
    "PullInProgress": 409,
    "Busy": 503,
    "DoesNotFit": 503,
    "DeviceDoesNotFit": 503,
    "DeviceUnavailable": 503,
    "OutOfMemory": 503,
    "MemoryError": 503,
    "DeviceError": 503,
    "Unloaded": 503,
    "DamagedModel": 500,
    "ExpertReadError": 500,
    "NotFiniteLogits": 500,
    "BadContext": 503,
    "ModelDataError": 400,
    "BadCheckpoint": 400,
}
_MOST_WORDS = 2000  # characters


_FAILED = "if that goes on, restart `moeinf serve`: a GPU that has failed is lost to its process"
_NEXT = {
    "OutOfDeviceMemory": "give `moeinf serve` less --device-memory, or free some of the device",
    "DeviceError": _FAILED,
    "NoKernels": "this installation lacks what `moeinf plan MODEL --device cuda` names",
    "DeviceUnavailable": _FAILED,
}


class BadRequest(InvalidValue):
    """A request asks for something that cannot be."""


def status_of(error: Exception) -> int:
    """By the class name, or that of an ancestor; what is nobody's fault but ours is 500."""
    return _known(error) or 500


def code_of(error: Exception) -> str:
    """The name of the error's class; `internal` for our own bugs."""
    return "internal" if _is_bug(error) else type(error).__name__


def words_of(error: Exception) -> str:
    """What happened; of our own bugs only that there was one."""
    words = str(error)[:_MOST_WORDS]  # a request can name what it likes
    if _is_bug(error):
        return f"this is a bug in moeinf: {type(error).__name__}: {words}"
    return (words or type(error).__name__) + _next(error)


def _next(error: Exception) -> str:
    """What whoever runs the server can do, where that is not to be seen."""
    names = (ancestor.__name__ for ancestor in type(error).__mro__)
    return next((f": {_NEXT[name]}" for name in names if name in _NEXT), "")


def noted(error: Exception, settings: Settings) -> Exception:
    """The error, which is about to be told; the traceback of a bug of ours is kept."""
    if _is_bug(error):
        note_bug(settings, error)
    return error


def _is_bug(error: Exception) -> bool:
    return _known(error) is None and not isinstance(error, OSError)


def _known(error: Exception) -> int | None:
    names = (ancestor.__name__ for ancestor in type(error).__mro__)
    return next((_STATUS[name] for name in names if name in _STATUS), None)


async def events(loaded: Loaded, job: Job, request: Request) -> AsyncGenerator[Event]:
    """Submits the job and gives what it emits. Leaving early, or the client's leaving, cancels it.

    job.emit is set here. Raises Busy or Unloaded when it is not even taken, and the error of a
    Failed when that comes first, so that a status can still say it.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Event] = asyncio.Queue()
    metrics: Metrics = request.app.state.metrics
    count = metrics.watch(loaded, job)

    def emit(event: Event) -> None:
        count(event)
        with suppress(RuntimeError):  # the loop has ended, and with it whoever listened
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
            yield event
            if isinstance(event, Ended | Failed):
                return
    finally:
        watch.cancel()
        job.cancelled.set()


async def _cancel_when_gone(request: Request, job: Job) -> None:
    """Until something is sent, nobody else notices that a client has hung up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    job.cancelled.set()
