"""Read and write containers: small files of named number arrays, for recordings and EAMCs.

    0   8  magic "MOEINF\\r\\n"
    8   4  u32 LE  bytes of the header, n
    12  4  u32 LE  CRC-32 of the header
    16  n  JSON {"kind", "version", "meta",
                 "arrays": [{"name", "dtype", "shape", "bytes", "crc32"}]}
    …      the arrays in that order, each deflated; `bytes` counts them so, `crc32` is of the
           numbers

The bytes are untrusted. Sizes are checked before memory is allocated. An array that inflates to
more bytes than its shape allows is an error.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast, get_args

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from moeinf.errors import UnusableInput

Arrays = dict[str, NDArray[Any]]

MAGIC = b"MOEINF\r\n"
_PREFIX = struct.Struct("<8sII")
_Dtype = Literal["|u1", "|b1", "<i2", "<u4", "<i4", "<i8", "<f4"]
_DTYPES = get_args(_Dtype)
_Size = Annotated[int, Meta(ge=0)]
_MAX_HEADER_BYTES = 16 << 20
_MAX_BYTES = 4 << 30  # of all arrays, inflated
_DEFLATE_LEVEL = 3  # ids and counts shrink 4 to 8 times; higher levels gain a few percent


class _Array(Struct):
    """One array of the header: `bytes` counts it deflated, `crc32` is of the numbers."""

    name: str
    dtype: _Dtype
    shape: tuple[_Size, ...]
    bytes: _Size
    crc32: _Size


class _Versions(Struct):
    kind: str
    version: int


class _Header(Struct):
    kind: str
    version: int
    meta: dict[str, Any]
    arrays: list[_Array]


class BadContainer(UnusableInput, ValueError):
    """The file is not a container of the expected kind, or is damaged."""

    code = "bad_trace"
    hint = "`moeinf trace --out FILE.eam`, which writes a recording"


def pack(kind: str, version: int, meta: Mapping[str, Any], arrays: Arrays) -> bytes:
    """Return the container as bytes. `meta` must be JSON, dtypes must be in `_DTYPES`."""
    bodies, table = [], []
    for name, array in arrays.items():
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        assert little.dtype.str in _DTYPES, f"{name}: {little.dtype.str}"
        body = zlib.compress(little.tobytes(), _DEFLATE_LEVEL)
        bodies.append(body)
        dtype = cast(_Dtype, little.dtype.str)
        crc = zlib.crc32(little.tobytes())
        table.append(_Array(name, dtype, little.shape, len(body), crc))
    header = msgspec.json.encode(_Header(kind, version, dict(meta), table))
    return b"".join((_PREFIX.pack(MAGIC, len(header), zlib.crc32(header)), header, *bodies))


def unpack(
    data: bytes, kind: str, version: int, most_bytes: int = _MAX_BYTES
) -> tuple[dict[str, Any], Arrays]:
    """Return (meta, arrays) of a container of this kind and version. Raises BadContainer.

    most_bytes: limit on the inflated size of all arrays together.
    """
    try:
        return _unpack(data, kind, version, most_bytes)
    except BadContainer:
        raise
    except (struct.error, zlib.error, ValueError, RecursionError) as error:
        words = "it ends early" if isinstance(error, struct.error) else error
        raise BadContainer(f"not a readable {kind} file: {words}") from error


def _unpack(data: bytes, kind: str, version: int, most_bytes: int) -> tuple[dict[str, Any], Arrays]:
    magic, size, crc = _PREFIX.unpack_from(data)
    if magic != MAGIC or size > _MAX_HEADER_BYTES:
        raise BadContainer(f"not a {kind} file of moeinf")
    header = data[_PREFIX.size : _PREFIX.size + size]
    if zlib.crc32(header) != crc:
        raise BadContainer("the header is damaged")
    found = _VERSIONS.decode(header)
    if found.kind != kind:
        raise BadContainer(f"a file of kind {found.kind!r}, not {kind!r}")
    if found.version != version:
        raise BadContainer(f"version {found.version}; this moeinf reads version {version}")
    document = _HEADER.decode(header)
    arrays, start = Arrays(), _PREFIX.size + size
    for entry in document.arrays:
        end = start + entry.bytes
        array = arrays[entry.name] = _array(entry, data[start:end], most_bytes)
        most_bytes -= array.nbytes
        start = end
    if start != len(data):
        raise BadContainer(f"{len(data)} bytes where the header counts {start}")
    return document.meta, arrays


def _array(entry: _Array, body: bytes, most_bytes: int) -> NDArray[Any]:
    dtype = np.dtype(entry.dtype)
    expected = math.prod(entry.shape) * dtype.itemsize
    if expected > most_bytes:
        raise BadContainer(f"an array of {expected} bytes where {most_bytes} are allowed")
    inflate = zlib.decompressobj()
    raw = inflate.decompress(body, expected + 1)
    if len(raw) != expected or zlib.crc32(raw) != entry.crc32:
        raise BadContainer(f"the array {entry.name!r} is damaged")
    return np.frombuffer(raw, dtype).reshape(entry.shape)


# Made here, not at the first use: msgspec builds the tables of a type without a lock.
_VERSIONS = msgspec.json.Decoder(_Versions)
_HEADER = msgspec.json.Decoder(_Header)
