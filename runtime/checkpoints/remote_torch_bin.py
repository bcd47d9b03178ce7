"""Read the table of a remote `.bin` file from a few short ranges.

The zip directory, at the end, gives the offset of every record's header, but not its length. A file
has as many records as tensors, so this module computes the headers instead of fetching them. torch
pads each header so that the data begin at a multiple of 64: see getPadding in
caffe2/serialize/inline_container.cc. The computed headers are written into a stub, a sparse file of
the same size. torch_bin.py reads the stub like any other file.

One real header is compared at once. `check_table` compares the whole table after the download.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, cast

from moeinf.errors import reason
from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint, SourceTensor
from moeinf.runtime.checkpoints.torch_bin import MAX_PICKLE_BYTES, is_storage, read_torch_file

_HEADER = struct.Struct("<4s22xHH")  # signature, lengths of the name and of the extra field
_SIGNATURE = b"PK\3\4"
_ALIGNMENT = 64
_MAX_32 = 0xFFFFFFFF

Read = Callable[[int, int], bytes]  # (start, stop) -> these bytes


def read_remote_table(size: int, read: Read, path: Path) -> dict[str, SourceTensor]:
    """Return the tensors of a remote file of `size` bytes that will be stored at `path`.

    It fetches the directory, the pickle and other records that are not storages, at most
    MAX_PICKLE_BYTES together. Raises BadCheckpoint.
    """
    with TemporaryDirectory() as aside:
        stub = Path(aside, path.name)
        with stub.open("w+b", buffering=0) as file:
            file.truncate(size)
            _fill(_Ranges(size, read, file, path), file, path)
        table = read_torch_file(stub)
    return {name: replace(tensor, path=path) for name, tensor in table.items()}


def check_table(path: Path, table: Mapping[str, SourceTensor]) -> None:
    """Raise BadCheckpoint if the table of a downloaded file differs from `table`."""
    if read_torch_file(path) != table:
        raise _elsewhere(path)


def _fill(ranges: _Ranges, stub: io.FileIO, path: Path) -> None:
    """Write into the stub what torch_bin.py reads. The directory is written as it is read."""
    try:
        with zipfile.ZipFile(cast(IO[bytes], ranges)) as archive:
            entries, end = sorted(archive.infolist(), key=_place), archive.start_dir
        _fill_from(entries, end, ranges, stub, path)
    except BadCheckpoint:
        raise
    except _NO_ZIP as e:
        raise BadCheckpoint(f"{path} is not a PyTorch zip file: {reason(e)}") from e


def _fill_from(
    entries: list[zipfile.ZipInfo], end: int, ranges: _Ranges, stub: io.FileIO, path: Path
) -> None:
    compared = False
    for entry, following in zip(entries, [*map(_place, entries[1:]), end], strict=True):
        if not is_storage(entry.filename):
            ranges.copy(entry.header_offset, following)
            continue
        header = _header(entry)
        ranges.check(entry.header_offset, len(header))
        stub.seek(entry.header_offset)
        stub.write(header)
        if not compared:
            real = _HEADER.unpack(ranges.get(entry.header_offset, _HEADER.size))
            if real != _HEADER.unpack(header):
                raise _elsewhere(path)
            compared = True


def _place(entry: zipfile.ZipInfo) -> int:
    return entry.header_offset


def _header(entry: zipfile.ZipInfo) -> bytes:
    """Return the computed local header of a record, up to the two lengths."""
    name = len(entry.orig_filename.encode())
    wide = [n for n in (entry.file_size, entry.file_size, entry.header_offset) if n >= _MAX_32]
    added = 4 + (4 + 8 * len(wide) if wide else 0)  # a padding field, and the zip64 sizes
    start = entry.header_offset + _HEADER.size + name + added
    return _HEADER.pack(_SIGNATURE, name, added + -start % _ALIGNMENT)


def _elsewhere(path: Path) -> BadCheckpoint:
    return BadCheckpoint(
        f"{path.name} is not laid out as torch.save does; download the repository "
        "(hf download), then: moeinf pull ./FOLDER"
    )


class _Before(OSError):
    """An offset before the beginning of a file. zipfile expects an OSError."""


_NO_ZIP = (_Before, zipfile.BadZipFile, RuntimeError, ValueError, LookupError, struct.error)


class _Ranges(io.RawIOBase):
    """The remote file that zipfile reads. All fetched bytes are also written into the stub."""

    def __init__(self, size: int, read: Read, stub: io.FileIO, path: Path) -> None:
        super().__init__()
        self._size, self._fetch, self._stub, self._path = size, read, stub, path
        self._at, self._left = 0, MAX_PICKLE_BYTES

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence] + offset
        if at < 0:
            raise _Before("an offset lies before the beginning")
        self._at = at
        return at

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        data = self.get(self._at, left if count < 0 else min(count, left))
        self._at += len(data)
        return data

    def copy(self, start: int, stop: int) -> None:
        """Copy the bytes start … stop-1 into the stub. Raises BadCheckpoint."""
        self.get(start, stop - start)

    def get(self, start: int, count: int) -> bytes:
        """Fetch `count` bytes at `start`. Raises BadCheckpoint as `check` does."""
        self._left -= count
        self.check(start, count)
        if not count:
            return b""
        data = self._fetch(start, start + count)
        self._stub.seek(start)
        self._stub.write(data)
        return data

    def check(self, start: int, count: int) -> None:
        """Raise BadCheckpoint for a range outside the file, or once too much was fetched."""
        if count < 0 or start + count > self._size or self._left < 0:
            raise BadCheckpoint(f"{self._path}: its table lies beyond the file, or is too large")
