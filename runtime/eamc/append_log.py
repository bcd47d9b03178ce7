"""Append checked records to a log file that several processes share.

    0   8  magic "MOEINFL\\n"
    8   …  records: u32 LE length, u32 LE CRC-32C of what follows, then `length` bytes

The first record is the header. A record is written by one call under an exclusive lock of the
folder, then synced. If a process dies during a write, the next process finds the partial record and
removes it. A rewrite goes through a temporary name. Unreadable data is moved to another file, never
deleted, and reported in one line.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from moeinf.native import crc32c
from moeinf.runtime.files.atomic import make_folder_durably, sync_folder
from moeinf.runtime.files.regular import open_regular
from moeinf.runtime.system import NO_FOLLOW, lock, open_folder

MAGIC = b"MOEINFL\n"
MAX_RECORD_BYTES = 64 << 20
MAX_LOG_BYTES = 4 << 30
_FRAME = struct.Struct("<II")


class RecordLog:
    """The log `name` in `folder` with the header record `header`."""

    def __init__(
        self,
        folder: Path,
        name: str,
        header: bytes,
        accepts: Callable[[bytes], str | None],
        note: Callable[[str], None],
    ) -> None:
        """Set the callbacks.

        accepts(header): returns None, or the reason why a stored header does not match; such a log
        is moved aside. note: receives one line for each file that was moved aside.
        """
        self._folder = folder
        self._path = folder / name
        self._header = header
        self._accepts = accepts
        self._note = note
        self._inode = -1
        self._end = 0  # the checked length of the file with that inode
        self._count = 0

    def append(self, record: bytes) -> int:
        """Append a record durably; return the number of records. Raises OSError."""
        assert len(record) <= MAX_RECORD_BYTES
        with self._opened() as descriptor:
            self._check(descriptor)
            _write(descriptor, _framed(record), self._end)
            os.fsync(descriptor)
            self._end += _FRAME.size + len(record)
            self._count += 1
        return self._count

    def read(self) -> list[bytes]:
        """Return every record in order, without the header. Return [] if there is no log."""
        if not self._path.exists():
            return []
        with self._opened() as descriptor:
            return self._check(descriptor, keep=True)

    def rewrite(self, change: Callable[[list[bytes]], Sequence[bytes]]) -> int:
        """Replace all records atomically by `change(records)`; return their number."""
        with self._opened() as descriptor:
            kept = list(change(self._check(descriptor, keep=True)))
            partial = self._path.with_name(f"{self._path.name}.partial")
            new = open_regular(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            try:
                at = 0
                for piece in (MAGIC + _framed(self._header), *map(_framed, kept)):
                    _write(new, piece, at)
                    at += len(piece)
                os.fsync(new)
                inode = os.fstat(new).st_ino
                partial.replace(self._path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
            finally:
                os.close(new)
            sync_folder(self._folder)
            self._inode, self._end, self._count = inode, at, len(kept)
        return len(kept)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Lock the folder and yield the log's descriptor, creating the log if necessary."""
        make_folder_durably(self._folder)
        folder = open_folder(self._folder)
        descriptor = -1
        try:
            lock(folder)
            descriptor = self._open()
            problem = self._check_header(descriptor)
            if problem is not None:
                aside = _free_name(self._path)
                self._path.rename(aside)
                self._note(f"{self._path} {problem}: it was put aside as {aside.name}")
                os.close(descriptor)
                descriptor = self._open()
                self._check_header(descriptor)
            yield descriptor
        finally:
            if descriptor >= 0:
                os.close(descriptor)
            os.close(folder)

    def _open(self) -> int:
        return open_regular(self._path, os.O_RDWR | os.O_CREAT | NO_FOLLOW)

    def _check_header(self, descriptor: int) -> str | None:
        """Return the problem with the log, or None. Writes the beginning of a new log."""
        about = os.fstat(descriptor)
        if about.st_size > MAX_LOG_BYTES:
            return f"has {about.st_size >> 20} MiB"
        start = MAGIC + _framed(self._header)
        if (
            about.st_size < len(start)
            and os.pread(descriptor, len(start), 0) == start[: about.st_size]
        ):
            _write(descriptor, start, 0)  # new, or created by a process that died during this write
            os.fsync(descriptor)
            sync_folder(self._folder)
            about = os.fstat(descriptor)
        if os.pread(descriptor, len(MAGIC), 0) != MAGIC:
            return "is not a log of moeinf"
        header = _read(descriptor, len(MAGIC), about.st_size)
        if header is None:
            return "has a damaged header"
        if about.st_ino != self._inode or about.st_size != self._end:  # inode numbers are reused
            self._inode, self._count = about.st_ino, 0
            self._end = len(MAGIC) + _FRAME.size + len(header)
        return self._accepts(header)

    def _check(self, descriptor: int, keep: bool = False) -> list[bytes]:
        """Check the records not checked yet, and cut off a damaged end.

        keep: check all records, and return them; otherwise return [].
        """
        size, found = os.fstat(descriptor).st_size, []
        if keep:
            start = os.pread(descriptor, _FRAME.size, len(MAGIC))
            self._end = len(MAGIC) + _FRAME.size + _FRAME.unpack(start)[0]
            self._count = 0
        while (record := _read(descriptor, self._end, size)) is not None:
            self._end += _FRAME.size + len(record)
            self._count += 1
            if keep:
                found.append(record)
        if self._end < size:
            self._cut(descriptor, size)
        return found

    def _cut(self, descriptor: int, size: int) -> None:
        """Truncate the log after the last whole record; save the rest in a new file."""
        rest, aside = size - self._end, _free_name(self._path)
        copy = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            for at in range(0, rest, 1 << 20):
                _write(copy, os.pread(descriptor, min(1 << 20, rest - at), self._end + at), at)
            os.fsync(copy)
        finally:
            os.close(copy)
        os.ftruncate(descriptor, self._end)
        os.fsync(descriptor)
        self._note(
            f"{self._path} ended in {rest} bytes that are damaged or half written: they were put "
            f"aside as {aside.name}, the {self._count} whole entries before are kept"
        )


def _framed(record: bytes) -> bytes:
    return _FRAME.pack(len(record), crc32c(record)) + record


def _read(descriptor: int, at: int, size: int) -> bytes | None:
    """Return the record at `at`, or None when it is incomplete or damaged."""
    frame = os.pread(descriptor, _FRAME.size, at)
    if len(frame) < _FRAME.size:
        return None
    length, crc = _FRAME.unpack(frame)
    if not 0 < length <= MAX_RECORD_BYTES or at + _FRAME.size + length > size:
        return None
    record = os.pread(descriptor, length, at + _FRAME.size)
    return record if len(record) == length and crc32c(record) == crc else None


def _write(descriptor: int, data: bytes, at: int) -> None:
    """Write all of `data` at offset `at`, also when a write is short."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written


def _free_name(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.aside-{number}")).exists():
        number += 1
    return aside
