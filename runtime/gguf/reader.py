"""Open a GGUF file with all its parts."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint, check_weights, explained
from moeinf.runtime.gguf.header import GgufTensor, Header, Room, parse_header

SUFFIX = ".gguf"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE | re.DOTALL)
_MAX_PARTS = 1000


@dataclass(frozen=True)
class GgufFile:
    """The metadata of the first part, and the tensors of all parts by name.

    factors: the values of the divisors of rope's frequencies, by the names of their tensors.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    paths: tuple[Path, ...]
    factors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


def read_gguf(path: Path) -> GgufFile:
    """Read the headers of a GGUF file, or of all parts of a split one, given any part.

    Raises BadCheckpoint for a missing part and for a header that is damaged or hostile.
    """
    folder = path.parent
    names = parts_of(path.name)
    return join_parts([folder / name for name in names], read_part)


def parts_of(name: str) -> list[str]:
    """Return the names of all parts that a file name `…-00001-of-00005.gguf` implies.

    A name without numbers is the only part. Raises BadCheckpoint for absurd numbers.
    """
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    number, count = int(match[2]), int(match[3])
    if not 1 <= number <= count <= _MAX_PARTS:
        raise BadCheckpoint(f"{name} is not a valid part of a split GGUF file")
    return [f"{match[1]}-{part:05}-of-{count:05}{name[-5:]}" for part in range(1, count + 1)]


def stem_of(name: str) -> str:
    """Return the name of a GGUF file without its suffix and its part's number."""
    match = _PART.fullmatch(name)
    return match[1] if match else name[: -len(SUFFIX)]


def read_part(path: Path, room: Room | None = None) -> Header:
    """Read the header of one local file. room: see parse_header. Raises BadCheckpoint."""
    check_weights(path)
    with explained(path), path.open("rb") as file:
        descriptor = file.fileno()
        size = os.fstat(descriptor).st_size
        return parse_header(path, size, lambda at, count: os.pread(descriptor, count, at), room)


def join_parts(paths: list[Path], read: Callable[[Path, Room], Header]) -> GgufFile:
    """Join the headers of all parts, in order. Raises BadCheckpoint if they do not fit."""
    room = Room()
    tensors: dict[str, GgufTensor] = {}
    factors: dict[str, tuple[float, ...]] = {}
    headers = [read(path, room) for path in paths]
    for number, (path, header) in enumerate(zip(paths, headers, strict=True)):
        count = header.metadata.get("split.count", 1)
        if count not in (len(paths), 0) or header.metadata.get("split.no", number) != number:
            raise BadCheckpoint(
                f"{path} says that it is part {header.metadata.get('split.no', 0)} of {count}, "
                f"its name that it is part {number} of {len(paths)}; "
                "a split file needs the names that llama.cpp gave its parts"
            )
        twice = tensors.keys() & header.tensors.keys()
        if twice:
            raise BadCheckpoint(f"{path} has {min(twice)!r}, which another part has as well")
        tensors |= header.tensors
        factors |= header.factors
    metadata = headers[0].metadata
    if len(paths) > 1 and metadata.get("split.tensors.count", len(tensors)) != len(tensors):
        raise BadCheckpoint(f"{paths[0]}: its parts have {len(tensors)} tensors, not all of them")
    return GgufFile(metadata, tensors, tuple(paths), factors)
