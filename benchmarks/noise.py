"""Random weights without their volume: every tensor is a span of one block of noise.

A checkpoint of 60 GB is a list of offsets into a file of a few hundred MB. The files made from it
(shards, GGUF files) have their real size.

The file `noise.bin`, in bfloat16:

    item 0          ONES items of 1.0, which are the norms' weights
    item ONES       normal noise of standard deviation 0.02, the TILE repeated; a matrix of D = 2048
                    then maps normed vectors to values near 1, as trained matrices do

Offsets are multiples of GROUP items, so that rows quantised in groups can be cut from a
quantised tile. TILE is GROUP times a prime: rows of a long tensor never repeat in step.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

GROUP = 32
TILE = GROUP * 524_287
ONES = 1 << 15
FILE = "noise.bin"
_DEVIATION = 0.02


@dataclass(frozen=True)
class Span:
    """One tensor: `count` items of the endless tiling of noise from `start` on, or ones."""

    start: int
    count: int
    ones: bool = False

    @property
    def item(self) -> int:
        """The tensor's first item in the file."""
        return 0 if self.ones else ONES + self.start


def span_of(name: str, count: int) -> Span:
    """Return the span of the tensor `name`, reproducible; a hash of the name sets its start."""
    if name.endswith("norm.weight"):  # and layernorm.weight
        if count > ONES:
            raise ValueError(f"{name} of {count} items is no norm")
        return Span(0, count, ones=True)
    return Span(zlib.crc32(name.encode()) % (TILE // GROUP) * GROUP, count)


def tile() -> NDArray[np.uint16]:
    """Return the noise as bfloat16 bits: [TILE]."""
    random = np.random.default_rng(0)
    values = random.standard_normal(TILE, np.float32) * np.float32(_DEVIATION)
    return (values.view(np.uint32) >> 16).astype(np.uint16)  # rounded towards zero


def write_noise(path: Path, largest: int) -> None:
    """Write a file that holds the spans of tensors of up to `largest` items."""
    need, noise = TILE + largest, tile()
    with path.open("wb") as file:
        np.full(ONES, 0x3F80, np.uint16).tofile(file)
        while need > 0:
            noise[:need].tofile(file)
            need -= TILE


def cut(tiled: NDArray[np.generic], start: int, count: int) -> NDArray[np.generic]:
    """Return rows start … start + count of the endless repetition of `tiled`."""
    rows = [tiled[start : start + count]]
    missing = count - len(rows[0])
    while missing > 0:
        rows.append(tiled[:missing])
        missing -= len(rows[-1])
    return np.concatenate(rows) if len(rows) > 1 else rows[0]
