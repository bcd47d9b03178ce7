"""Write expert shards: one routed expert per safetensors file.

The caller gives an expert's bytes in the order of layout.py.

    byte 0      length of the JSON header (u64, little endian)
    byte 8      JSON header, padded with spaces
    byte 4096   the expert's data, exactly as it lies in a slot: one aligned read fetches it
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Annotated

from msgspec import Meta, Struct

from moeinf.native import PAGE_BYTES, SHARD_DATA_OFFSET, crc32c
from moeinf.offload.format.direct_io import DirectWriter
from moeinf.offload.format.layout import ExpertKey, ExpertLayout

Bytes = Annotated[int, Meta(ge=0, lt=1 << 48)]


class FileRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """A file as recorded in a manifest. crc32c covers only the data from `data_offset` on.

    Raises ValueError for a path that leaves its folder or an invalid offset.
    """

    path: str
    size_bytes: Bytes
    sha256: str
    crc32c: Annotated[int, Meta(ge=0, lt=1 << 32)] | None = None
    data_offset: Bytes = 0

    def __post_init__(self) -> None:
        parts = PurePosixPath(self.path).parts
        if not parts or ".." in parts or self.path.startswith("/") or "\0" in self.path:
            raise ValueError(f"a file name leaves the model's folder: {self.path!r}")
        if self.data_offset % PAGE_BYTES or self.data_offset > self.size_bytes:
            raise ValueError(f"{self.path!r} has an invalid data_offset")

    @property
    def data_bytes(self) -> int:
        return self.size_bytes - self.data_offset


def shard_path(key: ExpertKey) -> str:
    """Return the path of a shard, relative to its model's folder."""
    return f"experts/L{key.layer:03d}/E{key.expert:03d}.safetensors"


def shard_header(key: ExpertKey, layout: ExpertLayout) -> bytes:
    """Return the first SHARD_DATA_OFFSET bytes of a shard."""
    tensors = {
        span.name: {
            "dtype": span.dtype,
            "shape": list(span.shape),
            "data_offsets": [span.offset_bytes, span.offset_bytes + span.size_bytes],
        }
        for span in layout.spans
    }
    about = {
        "format": "moeinf",
        "layout": str(layout.version),
        "layer": str(key.layer),
        "expert": str(key.expert),
    }
    if layout.down != layout.dtype:  # tiles of any format are U8
        about["formats"] = " ".join(layout.forms)
    return padded_header({"__metadata__": about, **tensors}, SHARD_DATA_OFFSET)


def padded_header(header: dict[str, object], multiple: int) -> bytes:
    """Return a safetensors length and JSON header, padded with spaces to a multiple of bytes."""
    text = json.dumps(header, separators=(",", ":")).encode()
    size = -(-(8 + len(text)) // multiple) * multiple
    return struct.pack("<Q", size - 8) + text.ljust(size - 8)


def write_file(folder: Path, name: str, header: bytes, data: Iterable[memoryview]) -> FileRecord:
    """Write header and data to `name` below `folder`, and hash them in the same pass.

    The file appears under its name only when it is complete. It is not durable yet: the caller
    makes many files durable together. Raises OSError, for example when the disk is full, and then
    deletes the partial file.
    """
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        with DirectWriter(partial) as out:
            sha, crc, size = hashlib.sha256(header), 0, len(header)
            out.write(memoryview(header))
            for block in data:
                sha.update(block)
                crc = crc32c(block, crc)
                size += block.nbytes
                out.write(block)
            out.finish()
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # of a write
            error.filename = os.fspath(path)
        raise
    return FileRecord(name, size, sha.hexdigest(), crc, len(header))
