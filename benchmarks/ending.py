"""A command that ends in time and leaves no files, however it ends.

Python's own cleanup covers errors and Ctrl-C. It does not cover SIGTERM, a closed terminal, a call
that never returns, or a process that is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_GRACE_S = 60.0  # for cleanup, after the time limit
_SIGNALS = {signal.SIGTERM: "ended by SIGTERM"}
if hasattr(signal, "SIGHUP"):  # not on Windows
    _SIGNALS[signal.SIGHUP] = "the terminal was closed"
_WATCH = """
import shutil, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.stdin.read()
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


class Ended(BaseException):
    """The reason, in words, why the command must end.

    It is not an Exception, so that no handler on the way treats it as an ordinary failure.
    """


class Stages:
    """The stages of a command: each is printed to standard error and timed.

    began_at is a time of time.monotonic().
    """

    def __init__(self) -> None:
        self.began_at = time.monotonic()
        self.seconds: dict[str, float] = {}
        self.now = "starting"
        self._began = time.perf_counter()

    def begin(self, name: str) -> None:
        """End the previous stage and begin this one; a repeated name adds to its seconds."""
        self.end()
        self.now = name
        print(f"{name} …", file=sys.stderr, flush=True)

    def end(self) -> None:
        """End the last stage."""
        now = time.perf_counter()
        self.seconds[self.now] = round(self.seconds.get(self.now, 0.0) + now - self._began, 1)
        self._began = now


@contextmanager
def ending(limit_s: float) -> Iterator[None]:
    """Raise Ended on the main thread at the end of limit_s, at SIGTERM or at SIGHUP.

    It is raised once, so that nothing disturbs the cleanup after it. A process that still runs 60 s
    after limit_s exits at once.
    """
    late, over, lock = False, False, threading.Lock()

    def end(number: int, _: object) -> None:
        for one in _SIGNALS:
            signal.signal(one, signal.SIG_IGN)
        raise Ended(f"no time left after {limit_s:g} s" if late else _SIGNALS[number])

    def time_is_over() -> None:
        nonlocal late
        with lock:
            if not over:
                late = True
                os.kill(os.getpid(), signal.SIGTERM)

    before = {one: signal.signal(one, end) for one in _SIGNALS}
    timers = threading.Timer(limit_s, time_is_over), threading.Timer(limit_s + _GRACE_S, _give_up)
    try:
        for timer in timers:
            timer.daemon = True
            timer.start()
        yield
    finally:
        with lock:
            over = True
        for timer in timers:
            timer.cancel()
        for one, handler in before.items():
            signal.signal(one, handler)


def _give_up() -> None:
    print("a call does not return: the process is ended", file=sys.stderr, flush=True)
    os._exit(1)


@contextmanager
def folder_that_goes(parent: Path | None, prefix: str) -> Iterator[Path]:
    """Yield a new folder; a separate process deletes it when this one leaves the block or dies."""
    with tempfile.TemporaryDirectory(dir=parent, prefix=prefix) as folder:
        watch = [sys.executable, "-c", _WATCH, folder]
        with subprocess.Popen(watch, stdin=subprocess.PIPE, start_new_session=True):
            yield Path(folder)
