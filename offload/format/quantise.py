"""Quantises rows of weights into tiles (native/kernels/tiles.h), and reads tiles back.

Does not know files, experts or tensors' names.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeinf.native import (
    BLOCK_ROWS,
    GROUP,
    Q4_ZERO,
    Q8_ZERO,
    TILE_COLUMNS,
    dequantise_rows,
    matrix_bytes,
    quantise_rows,
)

ALIGNMENT = 64  # bytes: tiles begin at multiples of it


def aligned(size: int) -> Tensor:
    """uint8 [size], uninitialised, beginning at a multiple of ALIGNMENT."""
    raw = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + size]


def quantise(rows: Tensor, form: str) -> Tensor:
    """[N, K] bf16 or float32, contiguous -> the tiles of Q4 or Q8 as uint8. Without the GIL."""
    count, columns = rows.shape
    tiles = torch.empty(matrix_bytes(form.lower(), count, columns), dtype=torch.uint8)
    wide = rows.dtype == torch.float32
    quantise_rows(rows.data_ptr(), count, columns, wide, form.lower(), tiles.data_ptr())
    return tiles


def dequantise(tiles: Tensor, form: str, count: int, columns: int) -> Tensor:
    """Tiles of a matrix [count, columns] -> float32."""
    rows = torch.empty(count, columns)
    dequantise_rows(tiles.data_ptr(), form.lower(), count, columns, rows.data_ptr())
    return rows


def tiled(codes: Tensor, scales: Tensor, form: str) -> Tensor:
    """Codes [N, W] uint8 and scales [N, W / 32] float16, W a multiple of 64 -> tiles.

    The rows that a block lacks have the code of zero and the scale 0, as `quantise` writes them.
    """
    rows, width = codes.shape
    lacking = -rows % BLOCK_ROWS
    zero = Q4_ZERO if form == "Q4" else Q8_ZERO
    codes = torch.cat((codes, codes.new_full((lacking, width), zero)))
    scales = torch.cat((scales, scales.new_zeros(lacking, scales.shape[1])))
    blocks, tiles = len(codes) // BLOCK_ROWS, width // TILE_COLUMNS
    groups = TILE_COLUMNS // GROUP
    shape = (blocks, BLOCK_ROWS, tiles, groups)
    if form == "Q4":  # [block, row, tile, group, nibble, word, byte]
        halves = codes.view(*shape, 2, GROUP // 8, 4)
        codes = halves[..., 0, :, :] | halves[..., 1, :, :] << 4
    words = codes.view(*shape, -1, 4).permute(0, 2, 3, 4, 1, 5).reshape(blocks, tiles, -1)
    sizes = scales.view(*shape).permute(0, 2, 3, 1).contiguous().view(torch.uint8)
    return torch.cat((words, sizes.view(blocks, tiles, -1)), -1).view(-1)
