"""End this process at once when a signal comes while a module is imported."""

from __future__ import annotations

import os
from types import FrameType

INTERRUPTED = 130  # the exit code of Ctrl-C
_IMPORT = "<frozen importlib._bootstrap>"


def leave(_signal: int, _frame: FrameType | None) -> None:
    """Exit at once: nothing needs cleaning up that the next command does not clean up."""
    if os.isatty(2) and os.environ.get("TERM", "dumb") != "dumb":
        os.write(2, b"\x1b[?25h")  # a progress bar hides the cursor
    os._exit(INTERRUPTED)


def leave_imports(number: int, frame: FrameType | None) -> None:
    """Exit at once if a module is being imported; a signal handler calls it before it raises.

    torch swallows exceptions while it is imported, and then stays half initialised, or its C++ code
    ends the process with SIGABRT.
    """
    above = frame
    while above is not None:
        if above.f_code.co_filename == _IMPORT:
            leave(number, frame)
        above = above.f_back
