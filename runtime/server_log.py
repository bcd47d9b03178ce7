"""Keep the log of background servers: $MOEINF_HOME/logs/server.log, mode 0600.

It is the standard output and standard error of every server that `moeinf run` starts.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from moeinf.runtime.config import Settings
from moeinf.runtime.files.atomic import make_folder_durably
from moeinf.runtime.files.regular import open_regular
from moeinf.runtime.system import NO_FOLLOW

_MOST_BYTES = 1 << 20
_LAST_BYTES = 4096
_LAST_LINES = 3


def open_log(settings: Settings) -> int:
    """Return a descriptor that appends to the log. Raises OSError."""
    make_folder_durably(settings.logs)
    descriptor = open_regular(
        settings.logs / "server.log", os.O_RDWR | os.O_APPEND | os.O_CREAT | NO_FOLLOW
    )
    keep_small(descriptor)
    return descriptor


def keep_small(descriptor: int) -> None:
    """Empty the log if it is too large. A descriptor of anything but a file is left alone."""
    with suppress(OSError):
        about = os.fstat(descriptor)
        if stat.S_ISREG(about.st_mode) and about.st_size > _MOST_BYTES:
            os.ftruncate(descriptor, 0)


def last_lines(descriptor: int, start: int) -> str:
    """Return the last lines written after the offset `start`, joined by semicolons."""
    with suppress(OSError):
        size = os.fstat(descriptor).st_size
        begin = max(start if start <= size else 0, size - _LAST_BYTES)
        text = os.pread(descriptor, _LAST_BYTES, begin).decode("utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return "; ".join(line.removeprefix("Error: ") for line in lines[-_LAST_LINES:])
    return ""
