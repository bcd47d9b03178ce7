"""Entry point of the console script: Ctrl-C ends it quietly from its first moment to its last.

Does not know commands. Imports nothing heavy, because until a handler stands an interrupt prints a
traceback.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from types import FrameType

_INTERRUPTED = 130


def main() -> None:
    """Runs the command line of this process and exits with its code."""
    # Whoever ignores SIGINT for us (nohup, a shell's background job) goes on doing so.
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, _leave)
    from moeinf.cli.main import answer

    pressed = False

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    try:
        if ours:
            signal.signal(signal.SIGINT, interrupt)
        code = answer(sys.argv[1:], lambda: pressed)
    except KeyboardInterrupt:  # around `answer`, whose own boundary sees all others
        code = _INTERRUPTED
    if ours:
        signal.signal(signal.SIGINT, _leave)
        # The interpreter's last steps take our handler away, and the default one kills: the
        # command has ended by then, with the code that it has.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


def _leave(_signal: int, _frame: FrameType | None) -> None:
    """Before a command has begun, and after it has ended, there is nothing to put in order."""
    os._exit(_INTERRUPTED)
