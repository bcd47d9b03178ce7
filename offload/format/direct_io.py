"""Read and write files past the page cache, in aligned blocks.

Reading gigabytes through the page cache copies every byte and evicts the data of other processes
(docs/decisions/0020 has the times).

Direct I/O requires that memory, offset and length are whole pages:

    read      the pages around what is wanted ──pread──▶ │ block │ ──▶ a view of what is wanted
    write     ──copied──▶ │ block │ ──pwrite when full──▶ file
    finish                │ rest, zeros to the page │ ──pwrite──▶ file, cut to its size

On a file system that refuses O_DIRECT, the same calls go through the page cache.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

from moeinf.native import PAGE_BYTES

BLOCK_BYTES = 2 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)  # 0 on systems without the flag
if _DIRECT:
    import fcntl
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)

# Unused blocks, kept because a new one costs a page fault per page. The data in a block may begin
# and end inside a page.
_spare: list[mmap.mmap] = []
_SPAN_BYTES = BLOCK_BYTES + 2 * PAGE_BYTES


class _DirectFile:
    """A descriptor and an aligned block, for one thread. The end of a `with` closes it."""

    def __init__(self, path: Path, flags: int) -> None:
        try:
            self._descriptor = os.open(path, flags | _DIRECT, 0o666)
            self.direct = bool(_DIRECT)  # until the file system refuses it
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self._descriptor = os.open(path, flags, 0o666)
            self.direct = False
        try:  # several threads may take one
            self._block = _spare.pop()
        except IndexError:
            self._block = mmap.mmap(-1, _SPAN_BYTES)
        self._memory = memoryview(self._block)

    def _refused(self, error: OSError) -> bool:
        """Clear O_DIRECT and return True when the file system accepts the flag but not the call."""
        if error.errno not in _REFUSED or not self.direct:
            return False
        self.direct = False
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
        return True

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
        self._memory.release()
        _spare.append(self._block)


class DirectReader(_DirectFile):
    """Reads ranges of a file."""

    def __init__(self, path: Path) -> None:
        """Open `path` for reading. Raises OSError."""
        super().__init__(path, os.O_RDONLY)

    def __enter__(self) -> DirectReader:
        return self

    def read(self, offset: int, count: int) -> memoryview:
        """Return a view of `count` bytes from `offset`; fewer only at the end of the file.

        count is at most BLOCK_BYTES. The view is valid until the next read or the end of the
        `with`. Raises OSError.
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


def is_direct(path: Path) -> bool:
    """Return True if the file system reads a page of this file directly. Raises OSError."""
    with DirectReader(path) as reader:
        reader.read(0, PAGE_BYTES)
        return reader.direct


class DirectWriter(_DirectFile):
    """Writes a new file once, from its beginning to its end."""

    def __init__(self, path: Path) -> None:
        """Create or truncate `path`. Raises OSError."""
        super().__init__(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._filled = 0  # bytes in the block
        self._written = 0  # bytes in the file

    def __enter__(self) -> DirectWriter:
        return self

    def write(self, data: memoryview) -> None:
        """Append data. Raises OSError, for example when the disk is full."""
        data = data.cast("B")
        while data:
            count = min(len(data), BLOCK_BYTES - self._filled)
            self._memory[self._filled : self._filled + count] = data[:count]
            self._filled += count
            data = data[count:]
            if self._filled == BLOCK_BYTES:
                self._flush(BLOCK_BYTES)

    def finish(self) -> None:
        """Write the rest of the block and cut the file to its size. Raises OSError.

        The data is not durable yet.
        """
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
