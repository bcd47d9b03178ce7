"""Open and read only regular files of bounded size, and follow only safe links.

A FIFO in place of a file would block, and a device would be read without end. A link in a
checkpoint's folder could copy a private file into a model.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from moeinf.runtime.system import NO_WAIT

_MOST_BYTES = 1 << 30


class NotRegular(OSError):
    """A file is not a regular file, is too large, or is a link that leaves its folder."""

    def __init__(self, path: Path, problem: str = "it is not a regular file") -> None:
        super().__init__(errno.EINVAL, problem, os.fspath(path))


def check_regular(path: Path) -> None:
    """Raise NotRegular for a device, a FIFO, a socket or a folder; OSError if it is missing."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise NotRegular(path)


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Return a descriptor of a regular file. Raises NotRegular, OSError."""
    with suppress(FileNotFoundError):  # `flags` may create the file
        check_regular(path)  # opening a device may already have effects
    # Without O_NONBLOCK, open would wait for the other end of a FIFO that has just appeared.
    descriptor = os.open(path, flags | NO_WAIT, mode)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegular(path)
    return descriptor


def read_regular(path: Path, most_bytes: int = _MOST_BYTES) -> bytes:
    """Return the bytes of a regular file. Raises NotRegular, OSError."""
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise NotRegular(path, f"it is too large ({size} bytes, at most {most_bytes})")
        data = bytearray()
        while len(data) <= most_bytes:  # a file may grow, and files in /proc report size 0
            block = file.read(most_bytes + 1 - len(data))
            if not block:
                return bytes(data)
            data += block
    raise NotRegular(path, f"it is too large (at most {most_bytes} bytes)")


def read_contained(path: Path, most_bytes: int) -> bytes:
    """Return the bytes of a regular file in a checkpoint's folder. Raises NotRegular, OSError.

    A link may lead only into the file's own folder or into a Hugging Face cache.
    """
    if path.is_symlink():
        _check_link(path)
    return read_regular(path, most_bytes)


def _check_link(path: Path) -> None:
    try:
        target, folder = path.resolve(strict=True), path.parent.resolve()
    except RuntimeError as error:  # a loop of links, before Python 3.13
        raise NotRegular(path, "it is a link in a loop") from error
    if not target.is_relative_to(folder) and not _in_hugging_face_cache(target):
        raise NotRegular(path, "it is a link to a file outside its folder")


def _in_hugging_face_cache(path: Path) -> bool:
    """Return True for a path in a Hugging Face cache: models--ORG--NAME/blobs/… or snapshots/…."""
    inner = zip(path.parts, path.parts[1:], strict=False)
    return any(
        repository.startswith(("models--", "datasets--")) and folder in ("blobs", "snapshots")
        for repository, folder in inner
    )
