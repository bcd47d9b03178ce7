"""Ctrl-C while a model answers: the first ends the answer, the second the program.

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
def interruptible() -> Iterator[Callable[[], bool]]:
    """Gives a question, "has Ctrl-C been pressed?", to be asked where stopping is safe."""
    pressed = False

    def press(_signal: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise Insisted
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
