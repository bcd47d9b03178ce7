"""Start the console script; Ctrl-C ends it quietly at any time.

Imports nothing heavy: before the handler is set, an interrupt prints a traceback.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from types import FrameType

_INTERRUPTED = 130


def main() -> None:
    """Run the command line of this process and exit with its code."""
    # If SIGINT was ignored at the start (nohup, a shell's background job), it stays ignored.
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
    except KeyboardInterrupt:  # outside `answer`, which catches all others
        code = _INTERRUPTED
    if ours:
        signal.signal(signal.SIGINT, _leave)
        # The interpreter's last steps restore the default handler, which would kill the process
        # and lose the exit code. The command has ended by then.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


def _leave(_signal: int, _frame: FrameType | None) -> None:
    """Exit at once: before and after a command there is nothing to clean up."""
    os._exit(_INTERRUPTED)
