"""Quantise rows of weights into tiles (native/kernels/tiles.h), and read tiles back."""

from __future__ import annotations

import torch
from torch import Tensor

from moeinf.native import dequantise_rows, matrix_bytes, quantise_rows


def quantise(rows: Tensor, form: str) -> Tensor:
    """Return contiguous rows [N, K], bf16 or float32, as tiles (uint8) of Q8 … Q2, Q4K, Q5K or Q6K.

    Frees the GIL. Raises ValueError for another form.
    """
    count, columns = rows.shape
    tiles = torch.empty(matrix_bytes(form.lower(), count, columns), dtype=torch.uint8)
    wide = rows.dtype == torch.float32
    quantise_rows(rows.data_ptr(), count, columns, wide, form.lower(), tiles.data_ptr())
    return tiles


def dequantise(tiles: Tensor, form: str, count: int, columns: int) -> Tensor:
    """Return the matrix [count, columns] of these tiles in float32."""
    rows = torch.empty(count, columns)
    dequantise_rows(tiles.data_ptr(), form.lower(), count, columns, rows.data_ptr())
    return rows
