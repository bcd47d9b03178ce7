"""Quantises rows of weights into tiles (native/kernels/tiles.h), and reads tiles back.

Does not know files, experts or tensors' names.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeinf.native import dequantise_rows, matrix_bytes, quantise_rows


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
