"""Define a request of a client, and the errors of its queue."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakMethod

from moeinf.errors import Unavailable
from moeinf.runtime.generation.events import Reading, Request

if TYPE_CHECKING:
    from moeinf.offload.routing.trace import RequestEam
    from moeinf.runtime.prefix.tree import Match

    Routed = Callable[[RequestEam | None, bool], None]
    Stored = Callable[[Match, int], None]

QUIET_S = 1.0  # a prompt that is read sooner is not reported
EVERY_S = 0.5  # the time between two reports
# Take the routing and the kept KV of the jobs that are made in this context (see Request). The
# engine's thread calls them.
ROUTED: ContextVar[Routed | None] = ContextVar("routed", default=None)
STORED: ContextVar[Stored | None] = ContextVar("stored", default=None)


class Busy(Unavailable, RuntimeError):
    """The request queue is full."""

    code = "busy"
    hint = "the same request later"


class Unloaded(Unavailable, RuntimeError):
    """The model was unloaded, or the server ended, before the answer was complete."""

    code = "unloaded"
    hint = "the same request again, which loads the model"


@dataclass(eq=False)
class Job(Request):
    """A request that any thread may cancel. It emits Reading while a long prompt is read.

    counts: the result is the number of the prompt's tokens in Ended; it needs no place.
    progress: of its prompt; None before its prefill.
    """

    cancelled: threading.Event = field(default_factory=threading.Event)
    counts: bool = False
    progress: Reading | None = None
    _told: float = 0.0  # seconds of prefill before the last report

    def __post_init__(self) -> None:
        self.stopped = self.cancelled.is_set
        read = WeakMethod(self._read)  # a job must not be a cycle: its text may be long
        self.reading = lambda done, tokens: (found := read()) and found(done, tokens)
        if (routed := ROUTED.get()) is not None:
            self.routed = routed
        if (stored := STORED.get()) is not None:
            self.stored = stored

    def _read(self, read: int, tokens: int) -> None:
        """Note that `read` of the prompt's tokens are in the KV cache."""
        cached = read if self.progress is None else self.progress.cached
        seconds = time.perf_counter() - (self.times.started or time.perf_counter())
        self.progress = Reading(read, tokens, cached, seconds)
        if seconds >= QUIET_S and seconds - self._told >= EVERY_S:
            self._told = seconds
            self.emit(self.progress)
