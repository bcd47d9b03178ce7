"""Read small files of strangers: regular files only, of bounded size, that no link leads astray.

Does not know what the files hold. A checkpoint folder may come from anywhere: a device in it would
be read without end, a FIFO would block, and a link could copy a private file into a model.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


class NotPlain(OSError):
    """A file is no regular file, is too large, or is a link that leaves its folder."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(errno.EINVAL, problem, os.fspath(path))


def check_regular(path: Path) -> None:
    """Raises NotPlain for a device, a FIFO, a socket or a folder; OSError when it is missing."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise NotPlain(path, "it is not a regular file")


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Return the bytes of a regular file. Raises NotPlain, or OSError.

    A link is followed only within the file's own folder, or into a Hugging Face cache.
    """
    if path.is_symlink():
        _check_link(path)
    # O_NONBLOCK: opening a FIFO returns at once.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise NotPlain(path, "it is not a regular file")
        if about.st_size > most_bytes:
            raise NotPlain(path, f"it is too large ({about.st_size} bytes, at most {most_bytes})")
        data = bytearray()
        while len(data) <= most_bytes:  # a file may grow, and those of /proc have no size
            block = file.read(most_bytes + 1 - len(data))
            if not block:
                return bytes(data)
            data += block
    raise NotPlain(path, f"it is too large (at most {most_bytes} bytes)")


def _check_link(path: Path) -> None:
    try:
        target, folder = path.resolve(strict=True), path.parent.resolve()
    except RuntimeError as error:  # a loop of links, before Python 3.13
        raise NotPlain(path, "it is a link in a loop") from error
    if not target.is_relative_to(folder) and not _in_hugging_face_cache(target):
        raise NotPlain(path, "it is a link to a file outside its folder")


def _in_hugging_face_cache(path: Path) -> bool:
    """Whether a path is that of a file of some repository: models--ORG--NAME/blobs/…"""
    inner = zip(path.parts, path.parts[1:], strict=False)
    return any(
        repository.startswith(("models--", "datasets--")) and folder in ("blobs", "snapshots")
        for repository, folder in inner
    )
