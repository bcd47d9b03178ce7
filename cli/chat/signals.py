"""Ctrl-C and SIGTERM while a model answers: the first ends the answer, the second the program.

Does not know what is being interrupted.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Leave(KeyboardInterrupt):
    """The program is to end now, a conversation included."""


class Insisted(Leave):
    """Ctrl-C was pressed again while the first was being obeyed."""


class Stopped(Leave):
    """`moeinf stop`, or the system, has asked this process to end (SIGTERM)."""


@contextmanager
def stoppable() -> Iterator[None]:
    """Within, SIGTERM raises Stopped, so that engines close as after any exception."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise Stopped

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def interruptible(*numbers: signal.Signals) -> Iterator[Callable[[], bool]]:
    """Gives a question, "is this to end?", to be asked where stopping is safe.

    Yes after the first of the signals `numbers`, Ctrl-C and SIGTERM if none are given; SIGTERM also
    raises Stopped at the end of the block. A second one raises at once, wherever the program is.
    """
    first: int | None = None

    def ask(number: int, _frame: FrameType | None) -> None:
        nonlocal first
        if first is not None:
            raise Insisted if number == signal.SIGINT else Stopped
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
