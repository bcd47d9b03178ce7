"""Keep nodes of a tree in files: $MOEINF_HOME/state/<name>/<tag>/prefix/<key>.kv, mode 0600.

    0      magic, version, length and CRC-32C of the header, then the header (JSON), then zeros
    8192   the node's bytes

A file is complete from the moment it has its name, and never changes. Its time is that of its last
use. A file that cannot be read, or is of another model, dtype or version, is never used. Old files
leave first when the folder is full. Several processes may share the folder.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct
from torch import Tensor

from moeinf.errors import reason
from moeinf.native import crc32c
from moeinf.offload.format.direct_io import BLOCK_BYTES, DirectReader
from moeinf.runtime.files.atomic import make_folder_durably, replaced, write_all
from moeinf.runtime.files.regular import open_regular
from moeinf.runtime.prefix.columns import Part
from moeinf.runtime.prefix.tree import BLOCK, KEY_BYTES, Node, key_of
from moeinf.runtime.sizes import format_bytes
from moeinf.runtime.system import drop_cached, lock

_MAGIC, _VERSION = b"MOEPREFX", 1
_START = struct.Struct("<8sIII")
_HEADER_BYTES = 8192
_PIECE_BYTES = 1 << 20  # written between two looks at whether requests run
_MOST_FILES = 4096
_SPARE_BYTES = 1 << 30  # of the drive, left to others
_Key = Annotated[str, Meta(pattern=f"^[0-9a-f]{{{2 * KEY_BYTES}}}$")]
_Token = Annotated[int, Meta(ge=0, lt=1 << 31)]


class Header(Struct):
    """The first bytes of a file. root: the key of the tree; parent: of the node above."""

    root: _Key
    parent: _Key
    start: Annotated[int, Meta(ge=0, lt=1 << 31)]
    tokens: Annotated[list[_Token], Meta(min_length=1, max_length=BLOCK)]
    snapshot: bool
    size_bytes: Annotated[int, Meta(ge=1, lt=1 << 40)]
    crc: Annotated[int, Meta(ge=0, lt=1 << 32)]


class BadFile(ValueError):
    """A file is damaged, or was not written by this version."""


class Abandoned(Exception):
    """A write is given up: the engine closes."""


class PrefixFolder:
    """The files of one model. Functions may be called from several threads."""

    def __init__(
        self, path: Path, root: bytes, most_bytes: int, note: Callable[[str], None]
    ) -> None:
        """note: receives a line about files that cannot be used."""
        self._path, self._root, self._most_bytes, self._note = path, root.hex(), most_bytes, note
        self.bytes_used = 0

    def scan(self) -> Iterator[tuple[bytes, Header]]:
        """Yield key and header of every usable file of this tree, parents first."""
        found = []
        for entry in self._entries():
            if entry.name.endswith(".partial"):
                _remove_if_left(Path(entry))
                continue
            key = bytes.fromhex(entry.name[: 2 * KEY_BYTES])
            try:
                header = self._header(key)
            except (OSError, BadFile) as error:
                self._note(f"prefix cache: {entry.name} is ignored: {reason(error)}")
                continue
            if header.root == self._root:
                found.append((key, header))
        self.bytes_used = sum(about.st_size for about, _ in self._files())
        yield from sorted(found, key=lambda one: one[1].start)

    def read(self, node: Node, parts: Sequence[Part]) -> None:
        """Read a node's bytes into parts that follow each other, past the page cache.

        Their content is invalid if it raises. Raises OSError, BadFile.
        """
        header, crc, at = self._header(node.key), 0, _HEADER_BYTES
        if header.size_bytes != sum(part.size_bytes for part in parts):
            raise BadFile("its size is wrong")
        with DirectReader(self._file(node.key)) as file:
            for group in _blocks(parts):
                size = sum(part.size_bytes for part in group)
                view = file.read(at, size)
                if len(view) != size:
                    raise BadFile("it is cut")
                crc, at = crc32c(view, crc), at + size
                for part in group:
                    part.take(view[: part.size_bytes])
                    view = view[part.size_bytes :]
        if crc != header.crc:
            raise BadFile("its checksum is wrong")

    def write(self, node: Node, data: Tensor, pause: Callable[[], None]) -> None:
        """Write a node. pause: called between pieces; it may wait, or raise Abandoned.

        Raises OSError.
        """
        assert node.parent is not None
        view = data.numpy().data
        tokens = node.tokens.tolist()
        parent, crc = node.parent.key.hex(), crc32c(view)
        about = Header(self._root, parent, node.start, tokens, node.snapshot, len(view), crc)
        text = msgspec.json.encode(about)
        head = _START.pack(_MAGIC, _VERSION, len(text), crc32c(text)) + text
        make_folder_durably(self._path)
        with replaced(self._file(node.key), 0o600) as descriptor:
            write_all(descriptor, head.ljust(_HEADER_BYTES, b"\0"))
            for at in range(0, len(view), _PIECE_BYTES):
                pause()
                write_all(descriptor, view[at : at + _PIECE_BYTES])
                os.fdatasync(descriptor)
            drop_cached(descriptor)
        self.bytes_used += _HEADER_BYTES + len(view)

    def touch(self, nodes: Collection[Node]) -> None:
        """Note the use of nodes; those before are never older than those after."""
        for node in reversed(list(nodes)):
            with suppress(OSError):
                os.utime(self._file(node.key))

    def make_room(self, size_bytes: int, kept: Collection[bytes]) -> list[bytes] | None:
        """Remove the oldest files until there is room for a node; return the keys of those.

        kept: keys of files that stay. None: there can be no room, and nothing is removed.
        """
        size_bytes += _HEADER_BYTES
        entries = self._files()
        entries.sort(key=lambda one: one[0].st_mtime_ns)
        used, removed = sum(about.st_size for about, _ in entries), list[str]()
        drive = os.statvfs(self._existing())
        free = drive.f_bavail * drive.f_frsize - _SPARE_BYTES
        left = len(entries)
        others = iter([one for one in entries if _key(one[1]) not in kept])
        while used + size_bytes > self._most_bytes or free < size_bytes or left >= _MOST_FILES:
            if (oldest := next(others, None)) is None:
                return None
            about, name = oldest
            used, free, left = used - about.st_size, free + about.st_size, left - 1
            removed.append(name)
        for name in removed:
            with suppress(OSError):
                (self._path / name).unlink()
        self.bytes_used = used
        return [_key(name) for name in removed]

    def _existing(self) -> Path:
        """Return the folder, or the first above it that exists."""
        return next(path for path in (self._path, *self._path.parents) if path.is_dir())

    def _file(self, key: bytes) -> Path:
        return self._path / f"{key.hex()}.kv"

    def _entries(self) -> list[os.DirEntry[str]]:
        """Return files of ours, also unfinished ones; others are left alone."""
        with suppress(OSError), os.scandir(self._path) as entries:
            return [entry for entry in entries if _ours(entry)]
        return []

    def _files(self) -> list[tuple[os.stat_result, str]]:
        """Return the state and name of each file; another process may remove some meanwhile."""
        found = []
        for entry in self._entries():
            with suppress(FileNotFoundError):
                found.append((entry.stat(follow_symlinks=False), entry.name))
        return found

    def _header(self, key: bytes) -> Header:
        """Read and check a header. Raises OSError, BadFile."""
        descriptor = open_regular(self._file(key))
        try:
            size = os.fstat(descriptor).st_size
            block = os.pread(descriptor, _HEADER_BYTES, 0)
        finally:
            os.close(descriptor)
        if len(block) < _HEADER_BYTES:
            raise BadFile("it is cut")
        magic, version, length, crc = _START.unpack_from(block)
        text = block[_START.size : _START.size + length]
        if magic != _MAGIC or version != _VERSION:
            raise BadFile("it is of another version")
        if len(text) != length or crc32c(text) != crc:
            raise BadFile("its header is damaged")
        try:
            header = _HEADER.decode(text)
        except (ValueError, RecursionError) as error:
            raise BadFile("its header is damaged") from error
        tokens = np.asarray(header.tokens, np.int32)
        if key_of(bytes.fromhex(header.parent), tokens, header.snapshot) != key:
            raise BadFile("its name is of another file")
        if size != _HEADER_BYTES + header.size_bytes:
            raise BadFile("its size is wrong")
        return header


def _blocks(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Divide parts into groups that one block of direct I/O holds."""
    group, size = list[Part](), 0
    for part in parts:
        if group and size + part.size_bytes > BLOCK_BYTES:
            yield group
            group, size = [], 0
        group.append(part)
        size += part.size_bytes
    yield group


def _ours(entry: os.DirEntry[str]) -> bool:
    stem = entry.name.removeprefix(".").removesuffix(".partial")
    if not entry.is_file(follow_symlinks=False) or not stem.endswith(".kv"):
        return False
    with suppress(ValueError):
        return len(bytes.fromhex(stem.removesuffix(".kv"))) == KEY_BYTES
    return False


def _key(name: str) -> bytes:
    return bytes.fromhex(name.removeprefix(".")[: 2 * KEY_BYTES])


def _remove_if_left(path: Path) -> None:
    """Remove an unfinished file, unless its writer lives."""
    with suppress(OSError):
        descriptor = open_regular(path, os.O_WRONLY)
        try:
            lock(descriptor, wait=False)
            path.unlink()
        finally:
            os.close(descriptor)


def full_words(error: OSError, size_bytes: int) -> str:
    """Return a note about a failed write."""
    return (
        f"prefix cache: {format_bytes(size_bytes)} cannot be written ({reason(error)}): "
        "it is kept in RAM alone"
    )


# Made here, not at the first use: msgspec builds the tables of a type without a lock.
_HEADER = msgspec.json.Decoder(Header)
