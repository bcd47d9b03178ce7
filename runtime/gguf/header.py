"""Parse the header of a GGUF file, whose bytes may be hostile.

The format is that of docs/gguf.md in the repository ggml: magic, version, two counts, pairs of key
and value, descriptions of tensors, padding, data. Sizes and counts are compared with the bytes of
the file before anything of that size is allocated. An array stays bytes until it is looked up.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moeinf.runtime.checkpoints.checkpoint import MAX_HEADER_BYTES, BadCheckpoint
from moeinf.runtime.checkpoints.quantised.ggml import TYPES

MAGIC = b"GGUF"
_BIG_ENDIAN = (2 << 24, 3 << 24)  # versions 2 and 3 with their bytes in the other order
_CHUNK_BYTES = 1 << 20
_MAX_KEY_BYTES, _MAX_KEYS = 1 << 16, 1 << 16
_MAX_NAME_BYTES, _MAX_TENSORS = 256, 1 << 18
_MAX_ITEMS = 1 << 22  # values in all arrays; a vocabulary has some 10^5
_MAX_ALIGNMENT = 1 << 16
_DEFAULT_ALIGNMENT = 32
_MAX_SIDE = 1 << 48
_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8",
    12: "<f8",
}  # fmt: skip
_FLOAT, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_LENGTH = struct.Struct("<Q")

FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_MAX_FACTOR_BYTES = 1 << 18

Fetch = Callable[[int, int], bytes]  # (offset, count) -> the bytes of the file


@dataclass(frozen=True)
class GgufTensor:
    """The name, GGML type, shape (outermost side first) and place of one tensor in a file."""

    name: str
    type: str
    shape: tuple[int, ...]
    path: Path
    offset: int  # in the file
    size_bytes: int


@dataclass
class Room:
    """Limits of the headers of all parts of a file together. Each header takes from them."""

    header_bytes: int = MAX_HEADER_BYTES
    keys: int = _MAX_KEYS
    tensors: int = _MAX_TENSORS
    items: int = _MAX_ITEMS


@dataclass(frozen=True)
class _Array:
    """An array as it lies in the file."""

    kind: int
    count: int
    data: bytes

    def values(self) -> list[Any]:
        if self.kind == _STRING:
            return list(self._strings())
        if self.kind == _BOOL:
            return [bool(item) for item in self.data]
        items = np.frombuffer(self.data, _NUMBERS[self.kind])
        if self.kind == _FLOAT:
            return [float(str(item)) for item in items]
        found: list[Any] = items.tolist()
        return found

    def _strings(self) -> Iterator[str]:
        at = 0
        for _ in range(self.count):
            start = at + 8
            at = start + int.from_bytes(self.data[at:start], "little")
            yield self.data[start:at].decode("utf-8", "replace")


class Metadata(Mapping[str, Any]):
    """Values by key. An array becomes a list when it is first looked up."""

    def __init__(self, stored: dict[str, Any]) -> None:
        self._stored = stored

    def __getitem__(self, key: str) -> Any:
        value = self._stored[key]
        if isinstance(value, _Array):
            value = self._stored[key] = value.values()
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


@dataclass(frozen=True)
class Header:
    """The metadata of one file by key, and its tensors by name."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    size_bytes: int  # of the header
    factors: Mapping[str, tuple[float, ...]]  # the values of the tensors FACTORS


def parse_header(path: Path, size: int, fetch: Fetch, room: Room | None = None) -> Header:
    """Read the header of a file of `size` bytes. Raises BadCheckpoint with the reason.

    path: names the file in errors. fetch: returns the bytes at an offset, fewer at the end. room:
    what the headers of the parts before have left.
    """
    cursor = _Cursor(path, size, fetch, room or Room())
    if cursor.take(4) != MAGIC:
        raise cursor.bad("is not a GGUF file: its first bytes are not GGUF")
    version = cursor.number("<u4")
    if version in _BIG_ENDIAN:
        raise cursor.bad("is a big-endian GGUF file, which is not supported")
    if version not in (2, 3):
        raise cursor.bad(f"is GGUF of version {version}; versions 2 and 3 are supported")
    tensors, keys = cursor.number("<u8"), cursor.number("<u8")
    cursor.room.tensors -= tensors
    cursor.room.keys -= keys
    if cursor.room.tensors < 0 or cursor.room.keys < 0:
        raise cursor.bad(f"claims {tensors} tensors and {keys} keys, which is too many")
    metadata: dict[str, Any] = {}
    for _ in range(keys):
        key = cursor.string(_MAX_KEY_BYTES)
        if key in metadata:
            raise cursor.bad(f"has the key {key[:80]!r} twice")
        metadata[key] = _value(cursor, key)
    described = [_describe(cursor) for _ in range(tensors)]
    start = _data_start(cursor, metadata)
    placed = _placed(cursor, described, *start)
    factors = {name: _factors(cursor, placed[name], fetch) for name in FACTORS if name in placed}
    return Header(Metadata(metadata), placed, cursor.at, factors)


def _factors(cursor: _Cursor, tensor: GgufTensor, fetch: Fetch) -> tuple[float, ...]:
    """Return the values of a small float32 vector. Raises BadCheckpoint."""
    if tensor.type != "F32" or len(tensor.shape) != 1 or tensor.size_bytes > _MAX_FACTOR_BYTES:
        raise cursor.bad(f"has {tensor.name!r} of type {tensor.type} and shape {tensor.shape}")
    data = fetch(tensor.offset, tensor.size_bytes)
    if len(data) != tensor.size_bytes:
        raise cursor.bad(f"is truncated: {tensor.name!r} reaches beyond the end of the file")
    return tuple(np.frombuffer(data, "<f4").tolist())


class _Cursor:
    """A position in the header, which reads ahead in chunks and never beyond its bounds."""

    def __init__(self, path: Path, size: int, fetch: Fetch, room: Room) -> None:
        self.path, self.size, self.room, self.at = path, size, room, 0
        self._fetch = fetch
        self._chunk, self._start = b"", 0

    def bad(self, problem: str) -> BadCheckpoint:
        return BadCheckpoint(f"{self.path} {problem}")

    def check(self, count: int) -> None:
        """Raise BadCheckpoint unless `count` more bytes are in the file and in the limit."""
        if count > self.size - self.at:
            raise self.bad("is truncated or damaged: its header reaches beyond the end of the file")
        if count > self.room.header_bytes:
            raise self.bad(f"has a header of more than {MAX_HEADER_BYTES} bytes, with other parts")

    def take(self, count: int) -> bytes:
        self.check(count)
        begin = self.at - self._start
        if begin + count > len(self._chunk):
            wanted = min(max(count, _CHUNK_BYTES), self.size - self.at)
            self._chunk, self._start, begin = self._fetch(self.at, wanted), self.at, 0
            if len(self._chunk) < count:
                raise self.bad("is truncated")
        self.at += count
        self.room.header_bytes -= count
        return self._chunk[begin : begin + count]

    def number(self, kind: str) -> Any:
        """Return one number. A float32 is the shortest decimal that rounds to it: 1e-05."""
        item = np.frombuffer(self.take(np.dtype(kind).itemsize), kind)[0]
        return float(str(item)) if kind == "<f4" else item.item()

    def string(self, most_bytes: int) -> str:
        length = self.number("<u8")
        if length > most_bytes:
            raise self.bad(f"has a string of {length} bytes where at most {most_bytes} are allowed")
        return self.take(length).decode("utf-8", "replace")

    def strings(self, count: int) -> bytes:
        """Return the lengths and bytes of `count` strings, as they lie."""
        self.check(8 * count)
        data = bytearray()
        while count:
            begin = end = self.at - self._start
            while count and end + 8 <= len(self._chunk):  # those that are in the chunk
                after = end + 8 + _LENGTH.unpack_from(self._chunk, end)[0]
                if after > len(self._chunk):
                    break
                end, count = after, count - 1
            data += self.take(end - begin)
            if count:
                data += (length := self.take(8))
                data += self.take(*_LENGTH.unpack(length))
                count -= 1
        return bytes(data)


def _value(cursor: _Cursor, key: str) -> Any:
    kind = cursor.number("<u4")
    if kind == _ARRAY:
        return _array(cursor, key)
    if kind == _STRING:
        return cursor.string(MAX_HEADER_BYTES)
    if kind == _BOOL:
        return cursor.take(1) != b"\0"
    if kind not in _NUMBERS:
        raise cursor.bad(f"gives {key[:80]!r} the unknown type {kind}")
    return cursor.number(_NUMBERS[kind])


def _array(cursor: _Cursor, key: str) -> _Array:
    kind, count = cursor.number("<u4"), cursor.number("<u8")
    if kind == _ARRAY:
        raise cursor.bad(f"has an array of arrays as {key[:80]!r}, which is not supported")
    cursor.room.items -= count
    if cursor.room.items < 0:
        raise cursor.bad(f"has more than {_MAX_ITEMS} values in arrays, with other parts")
    if kind == _STRING:
        return _Array(kind, count, cursor.strings(count))
    if kind not in (_BOOL, *_NUMBERS):
        raise cursor.bad(f"gives {key[:80]!r} the unknown type {kind}")
    size = 1 if kind == _BOOL else np.dtype(_NUMBERS[kind]).itemsize
    return _Array(kind, count, cursor.take(count * size))


def _describe(cursor: _Cursor) -> GgufTensor:
    """Read one description. Its offset is still relative to the data."""
    name = cursor.string(_MAX_NAME_BYTES)
    sides = cursor.number("<u4")
    if not 1 <= sides <= 4:
        raise cursor.bad(f"gives {name[:80]!r} {sides} sides")
    shape = tuple(reversed([cursor.number("<u8") for _ in range(sides)]))
    kind, offset = cursor.number("<u4"), cursor.number("<u8")
    if kind not in TYPES:
        raise cursor.bad(f"gives {name[:80]!r} the unknown type {kind}")
    about = TYPES[kind]
    if not all(0 < side < _MAX_SIDE for side in shape) or shape[-1] % about.weights:
        raise cursor.bad(f"gives {name[:80]!r} ({about.name}) an invalid shape")
    size = math.prod(shape) // about.weights * about.size_bytes
    return GgufTensor(name, about.name, shape, cursor.path, offset, size)


def _data_start(cursor: _Cursor, metadata: Mapping[str, Any]) -> tuple[int, int]:
    """Return the offset of the data, and the alignment of tensors, in bytes."""
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if (
        type(alignment) is not int
        or not 1 <= alignment <= _MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        raise cursor.bad(f"has an invalid general.alignment (a power of 2 up to {_MAX_ALIGNMENT})")
    return -(-cursor.at // alignment) * alignment, alignment


def _placed(
    cursor: _Cursor, described: list[GgufTensor], start: int, alignment: int
) -> dict[str, GgufTensor]:
    """Return the tensors by name, with offsets in the file, which must not overlap."""
    found: dict[str, GgufTensor] = {}
    end, before = 0, ""
    for tensor in sorted(described, key=lambda tensor: tensor.offset):
        name = tensor.name[:80]
        if tensor.name in found:
            raise cursor.bad(f"has the tensor {name!r} twice")
        if tensor.offset % alignment:
            raise cursor.bad(f"has {name!r} at an offset that is not aligned")
        if tensor.offset < end:
            raise cursor.bad(f"has {name!r}, which overlaps {before!r}")
        end, before = tensor.offset + tensor.size_bytes, name
        if start + end > cursor.size:
            raise cursor.bad(f"is truncated or damaged: {name!r} reaches beyond its end")
        found[tensor.name] = GgufTensor(
            tensor.name,
            tensor.type,
            tensor.shape,
            tensor.path,
            start + tensor.offset,
            tensor.size_bytes,
        )
    return found
