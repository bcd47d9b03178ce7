"""Lay out a GGUF file (version 3, little endian): keys, a table of tensors, then their data.

    0        "GGUF", u32 version, u64 number of tensors, u64 number of keys
    keys     string name, u32 type, value; a string is u64 length, then UTF-8
    tensors  string name, u32 sides, u64 per side (columns first), u32 type, u64 offset in the data
    data     every tensor at a multiple of 32 bytes

Source: docs/gguf.md in github.com/ggml-org/ggml.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Value = bool | int | float | str | Sequence[str] | NDArray[Any]  # arrays: of _ARRAYS
_ALIGNMENT = 32
_VERSION = 3
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _UINT64 = 4, 5, 6, 7, 8, 9, 10
_ARRAYS = {np.dtype("<f4"): _FLOAT32, np.dtype("<i4"): _INT32, np.dtype("<u8"): _UINT64}


class Kind(IntEnum):
    """The type of a tensor, by ggml's number."""

    F32 = 0
    Q4_0 = 2
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    I32 = 26
    BF16 = 30
    MXFP4 = 39
    NVFP4 = 40


_BLOCKS = {  # weights and bytes of a block
    Kind.F32: (1, 4),
    Kind.I32: (1, 4),
    Kind.BF16: (1, 2),
    Kind.Q4_0: (32, 18),
    Kind.Q8_0: (32, 34),
    Kind.Q4_K: (256, 144),
    Kind.Q5_K: (256, 176),
    Kind.Q6_K: (256, 210),
    Kind.MXFP4: (32, 17),
    Kind.NVFP4: (64, 36),
}


def fits(kind: Kind, columns: int) -> bool:
    """Return True if a row of so many columns is whole blocks."""
    return columns % _BLOCKS[kind][0] == 0


@dataclass(frozen=True)
class WrittenTensor:
    """A tensor of the file: its name, its type, and its shape with the columns last."""

    name: str
    kind: Kind
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        weights, size_bytes = _BLOCKS[self.kind]
        assert self.shape[-1] % weights == 0, self
        return self.shape[-1] // weights * size_bytes

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class FileLayout:
    """The bytes before the data, the offset of each tensor in the file, and the file's size."""

    header: bytes
    offsets: Mapping[str, int]
    size_bytes: int


def lay_out(keys: Mapping[str, Value], tensors: Sequence[WrittenTensor]) -> FileLayout:
    """Return the layout of a file with these keys and tensors, in their order."""
    table, at = [], 0
    places: dict[str, int] = {}
    for tensor in tensors:
        assert tensor.name not in places, tensor.name
        places[tensor.name] = at
        sides = tensor.shape[::-1]
        form = f"<I{len(sides)}QIQ"
        table.append(_text(tensor.name) + struct.pack(form, len(sides), *sides, tensor.kind, at))
        at = _aligned(at + tensor.size_bytes)
    start = struct.pack("<4sIQQ", b"GGUF", _VERSION, len(tensors), len(keys))
    told = [_text(name) + _encoded(value) for name, value in keys.items()]
    header = b"".join((start, *told, *table))
    header = header.ljust(_aligned(len(header)), b"\0")
    offsets = {name: len(header) + place for name, place in places.items()}
    return FileLayout(header, offsets, len(header) + at)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "replace")
    return struct.pack("<Q", len(data)) + data


def _encoded(value: Value) -> bytes:
    """Return the type and the bytes of a value."""
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", _ARRAY, _ARRAYS[value.dtype], len(value)) + value.tobytes()
    return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_text, value))


class FileWriter:
    """The file that is written: tensors at their places, in any order."""

    def __init__(self, path: Path, descriptor: int, layout: FileLayout) -> None:
        self._path, self._descriptor, self._layout = path, descriptor, layout

    def begin(self) -> None:
        """Write the header, and give the file its size. Raises OSError."""
        with self._named():
            os.ftruncate(self._descriptor, self._layout.size_bytes)
        self._write_at(memoryview(self._layout.header), 0)

    def write(self, tensor: WrittenTensor, rows: NDArray[np.uint8], offset: int) -> None:
        """Write encoded rows `offset` bytes behind the tensor's begin. Raises OSError."""
        data = np.ascontiguousarray(rows).reshape(-1).data
        self._write_at(data, self._layout.offsets[tensor.name] + offset)

    def _write_at(self, data: memoryview, offset: int) -> None:
        done = 0
        with self._named():
            while done < data.nbytes:  # a write may be short
                done += os.pwrite(self._descriptor, data[done:], offset + done)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name the file in an error of the system."""
        try:
            yield
        except OSError as error:
            error.filename = os.fspath(self._path)
            raise
