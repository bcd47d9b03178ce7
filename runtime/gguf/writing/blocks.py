"""Turn stored rows into the blocks of ggml, without loss.

Tiles (native/kernels/tiles.h) and blocks have the same groups of 32 weights, codes and scales, in
another order. A block is one group of one row:

    Q4_0    float16 scale, 16 bytes: byte j has weight j in its low nibble, j + 16 in its high one
    Q8_0    float16 scale, 32 signed bytes
    MXFP4   one byte E8M0, 16 bytes as in Q4_0

Tiles of Q4K, Q5K, Q6K and NVFP4 are interleaved blocks of ggml (offload/format/retile.py). Those of
NVFP4 have a factor of every row besides, which is another tensor of the file (factors.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moeinf.native import BLOCK_ROWS, tile_columns
from moeinf.offload.format.layout import is_tiled
from moeinf.offload.format.quantise import dequantise
from moeinf.offload.format.retile import BLOCK_BYTES
from moeinf.runtime.gguf.writing.writer import Kind, fits

Bytes = NDArray[np.uint8]
_KINDS = {
    "F32": Kind.F32,
    "BF16": Kind.BF16,
    "Q4": Kind.Q4_0,
    "Q8": Kind.Q8_0,
    "MXFP4": Kind.MXFP4,
    "Q4K": Kind.Q4_K,
    "Q5K": Kind.Q5_K,
    "Q6K": Kind.Q6_K,
    "NVFP4": Kind.NVFP4,
}
_GROUPS = 2  # of 32 columns, in a tile
_CODE_BYTES = {"Q4": 16, "Q8": 32, "MXFP4": 16}  # of a group of one row
_SCALE_BYTES = {"Q4": 2, "Q8": 2, "MXFP4": 1}
_FACTOR_BYTES = 4 * BLOCK_ROWS  # before the tiles of a row block of NVFP4


_LARGEST = 0x7F  # the scale 480 of a tile, which ggml takes for 0: there it is 0xFF


def kind_of(form: str, shape: tuple[int, ...], exact: bool) -> Kind:
    """Return the type in which a tensor stored in the format `form` is written.

    exact: it must be F32, as llama.cpp wants vectors and router gates. F32 also takes a matrix
    whose rows are not whole blocks.
    """
    kind = _KINDS[form]
    return Kind.F32 if exact or len(shape) == 1 or not fits(kind, shape[-1]) else kind


def encode_rows(data: Bytes, form: str, rows: int, columns: int, kind: Kind) -> Bytes:
    """Return rows stored in the format `form` as [rows, bytes of a row] of the type `kind`.

    data: whole row blocks of tiles, or row-major weights.
    """
    if kind == _KINDS[form]:
        if form in BLOCK_BYTES:
            return _interleaved(data, form, rows, columns)
        if form in _CODE_BYTES:
            return _blocks(data, form, rows, columns)
        return data.reshape(rows, -1)
    if kind == Kind.I32:
        return data.view("<f4").astype("<i4").view(np.uint8).reshape(rows, -1)
    assert kind == Kind.F32, kind
    if is_tiled(form):
        values = dequantise(torch.from_numpy(np.array(data)), form, rows, columns).numpy()
        return values.view(np.uint8).reshape(rows, -1)
    wide: NDArray[Any] = data.view("<u2").astype("<u4") << 16
    return wide.view(np.uint8).reshape(rows, -1)


def _interleaved(tiles: Bytes, form: str, rows: int, columns: int) -> Bytes:
    """Return the blocks of interleaved tiles: word w of row r is at byte 64 w + 4 r."""
    size = BLOCK_BYTES[form]
    words_end = size // 4 * 4 * BLOCK_ROWS
    wide = -(-columns // tile_columns(form.lower()))
    if form == "NVFP4":
        tiles = _row_blocks(tiles, columns)[:, _FACTOR_BYTES:]
    tiles = tiles.reshape(-1, wide, size * BLOCK_ROWS)
    deep = len(tiles)
    words = tiles[..., :words_end].reshape(deep, wide, -1, BLOCK_ROWS, 4).transpose(0, 3, 1, 2, 4)
    rest = tiles[..., words_end:].reshape(deep, wide, BLOCK_ROWS, -1).transpose(0, 2, 1, 3)
    parts = (words.reshape(deep, BLOCK_ROWS, wide, -1), rest)
    blocks = np.concatenate(parts, 3)
    if form == "NVFP4":
        scales = blocks[..., :4]
        scales[scales == _LARGEST] = 0xFF
    return blocks.reshape(deep * BLOCK_ROWS, -1)[:rows]


def factors_of(tiles: Bytes, rows: int, columns: int) -> NDArray[np.float32]:
    """Return the factors of rows of NVFP4, float32 [rows]."""
    found = _row_blocks(tiles, columns)[:, :_FACTOR_BYTES]
    return np.ascontiguousarray(found).view("<f4").reshape(-1)[:rows]


def _row_blocks(tiles: Bytes, columns: int) -> Bytes:
    """Return the factors and the tiles of each row block of NVFP4, one below the other."""
    wide = -(-columns // tile_columns("nvfp4"))
    return tiles.reshape(-1, _FACTOR_BYTES + wide * BLOCK_BYTES["NVFP4"] * BLOCK_ROWS)


def _blocks(tiles: Bytes, form: str, rows: int, columns: int) -> Bytes:
    """Return the blocks of tiles; the padding of tiles to whole rows and columns is dropped."""
    code, scale = _CODE_BYTES[form], _SCALE_BYTES[form]
    codes_end = _GROUPS * BLOCK_ROWS * code
    wide = -(-columns // (32 * _GROUPS))  # tiles of a row block
    tiles = tiles.reshape(-1, wide, codes_end + _GROUPS * BLOCK_ROWS * scale)
    deep = len(tiles)
    # [row block, tile, group, word, row, byte] -> [row block, row, tile, group, word, byte]
    codes = tiles[..., :codes_end].reshape(deep, wide, _GROUPS, code // 4, BLOCK_ROWS, 4)
    codes = codes.transpose(0, 4, 1, 2, 3, 5).reshape(deep * BLOCK_ROWS, wide * _GROUPS, code)
    scales = tiles[..., codes_end:].reshape(deep, wide, _GROUPS, BLOCK_ROWS, scale)
    scales = scales.transpose(0, 3, 1, 2, 4).reshape(deep * BLOCK_ROWS, wide * _GROUPS, scale)
    if form == "Q8":
        codes = codes ^ np.uint8(0x80)  # code − 128 as a signed byte
    found = np.concatenate((scales, codes), -1)[:rows, : columns // 32]
    return found.reshape(rows, -1)
