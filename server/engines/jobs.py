"""Define a request of a client, and the errors of its queue."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from moeinf.errors import Unavailable
from moeinf.runtime.generation.events import Request


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
    """A request that any thread may cancel."""

    cancelled: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.stopped = self.cancelled.is_set
