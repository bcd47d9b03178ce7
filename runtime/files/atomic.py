"""Write files that survive a power cut.

The order is: temporary name → fsync → rename → fsync of the folder.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moeinf.native import syncfs
from moeinf.runtime.files.regular import open_regular
from moeinf.runtime.system import NO_FOLLOW, check_locks, lock, open_folder


def write_bytes_durably(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write `path` completely or not at all; on return it is on the disk. Raises OSError."""
    with replaced(path, mode) as descriptor:
        write_all(descriptor, data, path)


def write_all(descriptor: int, data: bytes | memoryview, path: Path | None = None) -> None:
    """Write bytes at a descriptor's place. Raises OSError, with the path."""
    view = memoryview(data)
    try:
        while view:  # a write may be short
            view = view[os.write(descriptor, view) :]
    except OSError as error:
        error.filename = None if path is None else os.fspath(path)
        raise


@contextmanager
def replaced(path: Path, mode: int = 0o644) -> Iterator[int]:
    """Yield a descriptor of an empty file, which becomes `path` at the end, durably.

    After an error `path` is unchanged. Concurrent writers of one file wait for each other. A killed
    process leaves `.NAME.partial`, which the next writer reuses. Raises OSError.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        descriptor = _open_locked(partial, mode)
    except OSError as error:
        error.filename = os.fspath(path)  # the name that the caller gave
        raise
    try:
        os.ftruncate(descriptor, 0)
        _narrow(descriptor, mode)
        yield descriptor
        os.fsync(descriptor)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    sync_folder(path.parent)


def _narrow(descriptor: int, mode: int) -> None:
    """Take the rights that `mode` has not from a file that another writer left."""
    now = stat.S_IMODE(os.fstat(descriptor).st_mode)
    if now & ~mode and hasattr(os, "fchmod"):
        os.fchmod(descriptor, now & mode)


def _open_locked(path: Path, mode: int) -> int:
    """Open or create a file under an exclusive lock, and check that it still has its name."""
    check_locks()
    while True:
        descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | NO_FOLLOW, mode)
        try:
            lock(descriptor)
            with suppress(FileNotFoundError):
                if os.path.samestat(path.lstat(), os.fstat(descriptor)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the previous owner has renamed the file


def make_folder_durably(folder: Path) -> None:
    """Create a folder with mode 0700, and its missing parents."""
    if not folder.is_dir():
        make_folder_durably(folder.parent)
        folder.mkdir(exist_ok=True, mode=0o700)
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that the names in it are durable."""
    descriptor = open_folder(folder)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_filesystem(folder: Path) -> None:
    """Sync the file system of a folder; one call replaces thousands of fsyncs."""
    descriptor = open_folder(folder)
    try:
        syncfs(descriptor)
    finally:
        os.close(descriptor)
