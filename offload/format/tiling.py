"""Sort codes and scales into tiles (native/kernels/tiles.h) without rounding."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from moeinf.native import BLOCK_ROWS

GROUP = 32  # columns that share a scale in a tile
_TILE_GROUPS = 2
ZERO = {"Q4": 8, "Q8": 128, "MXFP4": 0}  # the code of the number 0


def tile(codes: Tensor, scales: Tensor, form: str) -> Tensor:
    """Return codes [R, C] and scales [R, ⌈C/32⌉] as the tiles of `form`, uint8 of one dimension.

    codes: uint8, one per weight. scales: float16, for MXFP4 uint8 exponents. Missing rows and
    columns get the code of zero and a scale of zero bits, as quantise_rows writes them.
    """
    rows, groups = scales.shape
    padding = ZERO[form]
    codes = functional.pad(codes, (0, groups * GROUP - codes.shape[1]), value=padding)
    codes = codes.view(rows, groups, GROUP)
    if form != "Q8":
        codes = codes[..., :16] | codes[..., 16:] << 4  # low nibble: k, high nibble: k + 16
        padding |= padding << 4
    return sort_into_tiles(codes, scales.contiguous()[..., None].view(torch.uint8), padding)


def sort_into_tiles(codes: Tensor, scales: Tensor, padding: int) -> Tensor:
    """Sort codes [R, G, c] and scales [R, G, s], uint8, into tiles, uint8 of one dimension.

    c and s are the bytes of a group's codes, as a tile has them, and of its scale. Missing rows and
    groups have codes of `padding` and scales of 0 bytes.
    """
    rows, groups, _ = scales.shape
    more = (0, 0, 0, groups % _TILE_GROUPS, 0, -rows % BLOCK_ROWS)  # bytes, then columns, then rows
    codes = functional.pad(codes, more, value=padding)
    scales = functional.pad(scales, more)
    shape = (len(scales) // BLOCK_ROWS, BLOCK_ROWS, -(-groups // _TILE_GROUPS), _TILE_GROUPS)
    words = codes.reshape(*shape, -1, 4).permute(0, 2, 3, 4, 1, 5).flatten(2)  # [B, tiles, bytes]
    factors = scales.reshape(*shape, -1).permute(0, 2, 3, 1, 4).flatten(2)
    return torch.cat((words, factors), -1).view(-1)
