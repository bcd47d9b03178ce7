"""Sort quantised blocks of a checkpoint into the tiles of native/kernels/tiles.h, without loss.

Blocks are those of GGUF's types Q4_K, Q5_K, Q6_K and NVFP4. The same NVFP4 has two tensors in a
safetensors checkpoint (ModelOpt, compressed-tensors), and a factor for the whole matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from moeinf.native import interleave_rows, matrix_bytes, tile_columns

BLOCK_BYTES = {"Q4K": 144, "Q5K": 176, "Q6K": 210, "NVFP4": 36}  # of tile_columns weights of a row
_GROUP = 16  # weights of NVFP4 that share a scale
_NAN = 0x7F  # the least byte that is no positive number of E4M3


def retile(blocks: Tensor, form: str, columns: int, factors: Tensor | None = None) -> Tensor:
    """Return the tiles (uint8) of a matrix [N, columns]; frees the GIL.

    blocks: uint8 [N, ceil(columns / tile columns) · BLOCK_BYTES[form]], row by row as in GGUF.
    factors: float32 [N] of NVFP4's rows, 1 if None. Raises ValueError for other shapes.
    """
    count, name = len(blocks), form.lower()
    size = -(-columns // tile_columns(name)) * BLOCK_BYTES[form]
    if blocks.dtype != torch.uint8 or blocks.shape != (count, size):
        raise ValueError(
            f"blocks are {list(blocks.shape)} {blocks.dtype} (expected [rows, {size}] uint8: "
            f"{columns} columns of {form})"
        )
    if factors is not None and (
        form != "NVFP4" or factors.dtype != torch.float32 or factors.shape != (count,)
    ):
        raise ValueError(f"factors are for NVFP4 only, and [{count}] float32")
    blocks = blocks.contiguous()
    factors = None if factors is None else factors.contiguous()
    tiles = torch.empty(matrix_bytes(name, count, columns), dtype=torch.uint8)
    address = 0 if factors is None else factors.data_ptr()
    interleave_rows(blocks.data_ptr(), address, count, columns, name, tiles.data_ptr())
    return tiles


def nvfp4_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """Return GGUF's blocks of NVFP4, uint8 [N, ceil(K / 64) · 36], for `retile`.

    codes: uint8 [N, K / 2], two numbers of E2M1 a byte, the low nibble first.
    scales: [N, K / 16], float8_e4m3fn or its bytes. Raises ValueError for other shapes, and for a
    scale that is negative or NaN.
    """
    rows, pairs = codes.shape
    scales = scales.view(torch.uint8)
    if codes.dtype != torch.uint8 or scales.shape != (rows, 2 * pairs // _GROUP) or pairs % 8:
        raise ValueError(f"codes are {list(codes.shape)} and scales {list(scales.shape)}")
    if (scales >= _NAN).any():
        raise ValueError("a scale is negative or NaN")
    padding = -scales.shape[1] % 4
    scales = functional.pad(scales, (0, padding)).view(rows, -1, 4)
    codes = functional.pad(codes, (0, padding * _GROUP // 2)).view(rows, -1, 4, 2, 4, 1)
    both = torch.cat((codes & 15, codes >> 4), 5).flatten(4)  # [N, blocks, 4, halves of 8, 8]
    nibbles = both[:, :, :, 0] | both[:, :, :, 1] << 4
    return torch.cat((scales, nibbles.flatten(2)), 2).flatten(1)
