"""Start the console script; Ctrl-C ends it quietly at any time.

Imports nothing heavy: before the handler is set, an interrupt prints a traceback.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from moeinf.cli.imports import uncollected
from moeinf.cli.leave import INTERRUPTED, leave, leave_imports
from moeinf.errors import as_moeinf, lacks_memory

_AGAIN_S = 0.01


def main() -> NoReturn:
    """Run the command line of this process and exit with its code."""
    ours = False
    # Torch's threads would spin for milliseconds after each small step of a prompt, on the cores
    # that the native kernels need. GCC's OpenMP reads this while torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        # If SIGINT was ignored at the start (nohup, a shell's background job), it stays ignored.
        ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if ours:
            signal.signal(signal.SIGINT, leave)
        with uncollected():
            from moeinf.cli.main import answer
        if hasattr(signal, "setitimer"):  # not on Windows: such a signal is lost
            sys.unraisablehook = _raise_again
            signal.signal(signal.SIGALRM, _interrupt)
        if ours:
            signal.signal(signal.SIGINT, _interrupt)
        code = answer(sys.argv[1:])
    except (MemoryError, ImportError) as error:  # nothing more can be loaded, not even to tell it
        if not lacks_memory(error):
            raise
        _tell(error)
        os._exit(1)
    except KeyboardInterrupt:  # outside `answer`, which catches all others
        code = INTERRUPTED
    if ours:
        signal.signal(signal.SIGINT, leave)
        # A late Ctrl-C must not replace the exit code while the functions of atexit run.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    _finish(code)


def _tell(error: BaseException) -> None:
    """Print an error with what is loaded."""
    told = as_moeinf(error)
    with suppress(OSError):
        os.write(2, f"Error: {told}\nTry: {told.hint}\n".encode())


def _finish(code: int) -> NoReturn:
    """Exit as `sys.exit` does, but do not free torch's modules, which takes up to 0.7 s.

    Threads are joined, the functions of atexit run, and the streams are flushed, in this order.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # it is closed
            stream.flush()
    os._exit(code)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, or exit at once while a module is imported."""
    leave_imports(number, frame)
    raise KeyboardInterrupt


def _raise_again(lost: sys.UnraisableHookArgs) -> None:
    """Raise a KeyboardInterrupt again that Python dropped, for example in a `__del__`.

    SIGTERM raises a kind of it, also where SIGINT is ignored.
    """
    if isinstance(lost.exc_value, KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)  # this frame would drop it, too
    else:
        sys.__unraisablehook__(lost)
