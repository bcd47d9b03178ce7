"""Handle Ctrl-C and SIGTERM: the first signal ends the answer, the second the program."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from moeinf.cli.leave import leave_imports


class Leave(KeyboardInterrupt):
    """The program must end now, a conversation included."""


class SecondInterrupt(Leave):
    """Ctrl-C was pressed again before the first one took effect."""


class Stopped(Leave):
    """`moeinf stop` or the system has sent this process SIGTERM."""


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise Stopped for SIGTERM inside the block, so that engines close normally."""

    def stop(number: int, frame: FrameType | None) -> None:
        leave_imports(number, frame)
        raise Stopped

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def interruptible(*numbers: signal.Signals) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True once a signal has arrived; call it where a stop is safe.

    numbers: the signals; Ctrl-C and SIGTERM by default. SIGTERM also raises Stopped at the end of
    the block. A second signal raises at once, wherever the program is.
    """
    first: int | None = None

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if first is not None:
            leave_imports(number, frame)
            raise SecondInterrupt if number == signal.SIGINT else Stopped
        first = number

    numbers = numbers or (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield lambda: first is not None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if first == signal.SIGTERM:
        raise Stopped
