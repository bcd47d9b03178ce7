"""Weights in older layouts of the quantised formats, brought into today's: values stay the same.

Does not know files. A new layout adds a line to `_READERS` for the one that it replaces. Layout
1 was never released: it keeps the way from one layout to the next in use.

    layout 1 of Q8 and Q4, for a matrix [N, K] with K padded to W = 64 · ceil(K / 64):
        codes    row by row; Q8 a byte each [N, W], Q4 two a byte [N, W / 2], the even k low
        scales   [N, W / 32] float16
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moeinf.native import GROUP, TILE_COLUMNS
from moeinf.offload.format.layout import OLDER_VERSIONS
from moeinf.offload.format.quantise import tiled


class _Reader(NamedTuple):
    """How a layout is read: its bytes for [N, K], and its codes [N, W] and scales [N, W / 32]."""

    size_bytes: Callable[[str, int, int], int]
    read: Callable[[Tensor, str, int, int], tuple[Tensor, Tensor]]


def older_bytes(form: str, version: int, rows: int, columns: int) -> int:
    """Bytes of a matrix in an older layout."""
    return _READERS[form, version].size_bytes(form, rows, columns)


def retiled(data: Tensor, form: str, version: int, rows: int, columns: int) -> Tensor:
    """uint8 bytes of a matrix in an older layout -> today's tiles of it."""
    codes, scales = _READERS[form, version].read(data, form, rows, columns)
    return tiled(codes, scales, form)


def _row_major_bytes(form: str, rows: int, columns: int) -> int:
    width = _width(columns)
    return rows * (width // (2 if form == "Q4" else 1) + 2 * (width // GROUP))


def _read_row_major(data: Tensor, form: str, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    width = _width(columns)
    split = rows * width // (2 if form == "Q4" else 1)
    codes, scales = data[:split].view(rows, -1), data[split:].clone().view(torch.float16)
    if form == "Q4":
        codes = torch.stack((codes & 15, codes >> 4), -1).view(rows, width)
    return codes, scales.view(rows, -1)


def _width(columns: int) -> int:
    return -(-columns // TILE_COLUMNS) * TILE_COLUMNS


_READERS = {
    ("Q8", 1): _Reader(_row_major_bytes, _read_row_major),
    ("Q4", 1): _Reader(_row_major_bytes, _read_row_major),
}
assert _READERS.keys() == OLDER_VERSIONS
