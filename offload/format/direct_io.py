"""Reads and writes files past the page cache, in aligned blocks.

Does not know what the bytes are. Gigabytes that pass through the page cache cost a copy of every
byte, and drive out what others have there (docs/decisions/0020 has the times).

Direct input and output wants memory, offset and length in whole pages:

    read      the pages around what is wanted ──pread──▶ │ block │ ──▶ a view of what is wanted
    write     ──copied──▶ │ block │ ──pwrite when full──▶ file
    finish                │ rest, zeros to the page │ ──pwrite──▶ file, cut to its size

A file system that refuses O_DIRECT gets the same calls through its cache.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path

from moeinf.native import PAGE_BYTES

BLOCK_BYTES = 2 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)  # not on every system: then it changes nothing
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)

# Blocks between two uses: a new one costs a page fault per page. Whatever lies in a block may begin
# and end inside a page.
_spare: list[mmap.mmap] = []
_SPAN_BYTES = BLOCK_BYTES + 2 * PAGE_BYTES


class _DirectFile:
    """A descriptor and an aligned block; used by one thread. Closed at the end of a `with`."""

    def __init__(self, path: Path, flags: int) -> None:
        try:
            self._descriptor = os.open(path, flags | os.O_CLOEXEC | _DIRECT, 0o666)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self._descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
        self._block = _spare.pop() if _spare else mmap.mmap(-1, _SPAN_BYTES)
        self._memory = memoryview(self._block)

    def _refused(self, error: OSError) -> bool:
        """Some file systems take the flag and refuse the call: True after giving the flag up."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        if error.errno not in _REFUSED or not flags & _DIRECT:
            return False
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
        return True

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
        self._memory.release()
        _spare.append(self._block)


class DirectReader(_DirectFile):
    """A file of which ranges are read."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        super().__init__(path, os.O_RDONLY)

    def __enter__(self) -> DirectReader:
        return self

    def read(self, offset: int, count: int) -> memoryview:
        """Up to BLOCK_BYTES; fewer than `count` only at the end of the file.

        The view is valid until the next read, or the end of the `with`. Raises OSError.
        """
        assert count <= BLOCK_BYTES
        first = offset // PAGE_BYTES * PAGE_BYTES
        wanted = -(-(offset + count - first) // PAGE_BYTES) * PAGE_BYTES
        got = 0
        while got < offset - first + count:
            try:
                more = os.preadv(self._descriptor, [self._memory[got:wanted]], first + got)
            except OSError as error:
                if not self._refused(error):
                    raise
                continue
            if more == 0:
                break
            got += more
        return self._memory[offset - first : max(offset - first, min(got, offset - first + count))]


class DirectWriter(_DirectFile):
    """A new file that is written once, from its beginning to its end."""

    def __init__(self, path: Path) -> None:
        """Creates or empties `path`. Raises OSError."""
        super().__init__(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._filled = 0  # bytes in the block
        self._written = 0  # bytes in the file

    def __enter__(self) -> DirectWriter:
        return self

    def write(self, data: memoryview) -> None:
        """Appends. Raises OSError (a full disk, say)."""
        data = data.cast("B")
        while data:
            count = min(len(data), BLOCK_BYTES - self._filled)
            self._memory[self._filled : self._filled + count] = data[:count]
            self._filled += count
            data = data[count:]
            if self._filled == BLOCK_BYTES:
                self._flush(BLOCK_BYTES)

    def finish(self) -> None:
        """Writes what is left, through to the end; not yet durable. Raises OSError."""
        size = self._written + self._filled
        whole = -(-self._filled // PAGE_BYTES) * PAGE_BYTES
        self._memory[self._filled : whole] = bytes(whole - self._filled)
        self._flush(whole)
        if self._written > size:
            os.ftruncate(self._descriptor, size)

    def _flush(self, count: int) -> None:
        done = 0
        while done < count:
            try:
                done += os.pwrite(self._descriptor, self._memory[done:count], self._written + done)
            except OSError as error:
                if not self._refused(error):
                    raise
        self._written += count
        self._filled = 0
