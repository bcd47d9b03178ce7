"""Decide when a failed transfer is tried again."""

from __future__ import annotations

import email.utils
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

_MAX_WAIT_SECONDS = 60.0


@dataclass(frozen=True)
class Patience:
    """Limits of the retries: attempts without progress, and seconds without a byte."""

    attempts: int = 8
    stall_seconds: float = 30.0
    first_wait_seconds: float = 0.5
    wait: Callable[[threading.Event, float], object] = threading.Event.wait

    def pause(self, stop: threading.Event, failures: int, asked_seconds: float | None) -> None:
        """Wait before the next attempt, or until `stop` is set.

        The wait is `asked_seconds` if the server gave it. Otherwise it grows exponentially with
        `failures`, with random jitter, up to 60 seconds.
        """
        if asked_seconds is None:
            ahead = min(self.first_wait_seconds * 2**failures, _MAX_WAIT_SECONDS)
            asked_seconds = ahead * random.uniform(0.5, 1.0)
        self.wait(stop, asked_seconds)


class TooSlow(Exception):
    """The bytes of an answer only drip."""


class RetryLater(Exception):
    """The server asks to retry later, after `seconds` if it gives a time."""

    def __init__(self, status: int, seconds: float | None) -> None:
        super().__init__(f"the server answers {status}")
        self.seconds = seconds


def retry_after(value: str | None) -> float | None:
    """Return the seconds of a Retry-After header, a number or a date; None if it is unusable."""
    if value is None:
        return None
    with suppress(ValueError):
        return min(max(0.0, float(value)), _MAX_WAIT_SECONDS)
    with suppress(ValueError, TypeError, LookupError, ArithmeticError, AttributeError, OSError):
        moment = email.utils.parsedate_to_datetime(value)
        return min(max(0.0, moment.timestamp() - time.time()), _MAX_WAIT_SECONDS)
    return None
