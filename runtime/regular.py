"""Opens regular files only: a FIFO, a device or a socket in the place of a file never blocks.

Does not know what the files hold. Every reader and writer of a home's files opens them here.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


class NotRegular(OSError):
    """There is something else in the place of a file."""


def check_regular(path: Path) -> None:
    """Raise NotRegular if `path` is there and is no regular file. For files that others open."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return  # opening it tells why
    if not stat.S_ISREG(mode):
        raise _not_regular(path)


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Return a descriptor of a regular file. Raises NotRegular, OSError."""
    check_regular(path)  # opening a device may already do something
    # Without O_NONBLOCK a FIFO that appears meanwhile would wait for its other end.
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular(path)
    return descriptor


def read_regular(path: Path, most_bytes: int = 1 << 30) -> bytes:
    """Return the bytes of a regular file. Raises NotRegular; OSError for a larger one, too."""
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"more than {most_bytes} bytes", str(path))
    return data


def _not_regular(path: Path) -> NotRegular:
    return NotRegular(errno.EINVAL, "not a regular file", str(path))
