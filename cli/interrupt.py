"""Ctrl-C while a model answers: the first ends the answer, the second the program.

Does not know what is being interrupted.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Insisted(KeyboardInterrupt):
    """Ctrl-C was pressed again while the first was being obeyed."""


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
