"""Read the quantised formats of GGML, which GGUF files hold.

A row is a sequence of blocks. `gguf.quants` widens all of them. Q4_0, Q8_0 and MXFP4 have groups of
32 weights with one scale, like our tiles: their codes and scales are sorted into tiles unchanged.
NVFP4 has a factor of the whole matrix in another tensor, where a file has one (gguf/checkpoint.py).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moeinf.native import BLOCK_ROWS
from moeinf.offload.format.quantise import dequantise
from moeinf.offload.format.retile import BLOCK_BYTES
from moeinf.offload.format.retile import retile as retile_blocks
from moeinf.offload.format.tiling import sort_into_tiles
from moeinf.runtime.checkpoints.checkpoint import (
    INTEGER_DTYPE,
    TORCH_DTYPE,
    Recipe,
    SourceTensor,
    read_exactly,
)
from moeinf.runtime.checkpoints.matrix_rows import read_whole
from moeinf.runtime.checkpoints.quantised.fused_experts import MXFP4
from moeinf.runtime.checkpoints.quantised.nvfp4 import NVFP4

PREFIX = "GGML_"  # of the dtype of a SourceTensor: GGML_Q4_K
_ITEMS = 1 << 20  # weights widened at a time: 4 MiB as float32


class GgmlType(NamedTuple):
    """A type of GGML: blocks of `weights` weights in `size_bytes` bytes."""

    name: str
    weights: int
    size_bytes: int


# By number, as in ggml.h (enum ggml_type) and ggml-common.h (struct block_…).
TYPES = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136),
    26: GgmlType("I32", 1, 4),  # of DeepSeek-V4's table of experts
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17),
    40: GgmlType("NVFP4", 64, 36),
}
_BY_NAME = {about.name: about for about in TYPES.values()}
# The types whose blocks are those of a tiled format: their form, and the place of their scales.
_SAME = {
    "Q4_0": ("Q4", slice(0, 2)), "Q8_0": ("Q8", slice(0, 2)), "MXFP4": (MXFP4, slice(0, 1)),
    "Q4_K": ("Q4K", slice(0, 4)), "Q5_K": ("Q5K", slice(0, 4)), "Q6_K": ("Q6K", slice(208, 210)),
    "NVFP4": (NVFP4, slice(0, 4)),
}  # fmt: skip
_PADDING = {"Q4_0": 0x88, "Q8_0": 0x80, "MXFP4": 0}  # codes of missing weights


def dtype_of(ggml_type: str) -> str:
    """Return the dtype of a SourceTensor: F32, F16, BF16 and I32 keep their names."""
    return ggml_type if ggml_type in TORCH_DTYPE | INTEGER_DTYPE else PREFIX + ggml_type


def is_ggml(dtype: str) -> bool:
    """Return True for a quantised format of GGML."""
    return dtype.startswith(PREFIX)


def bits_of(dtype: str) -> float:
    """Return the bits per weight of a dtype that GGUF files have."""
    about = _BY_NAME[dtype.removeprefix(PREFIX)]
    return 8 * about.size_bytes / about.weights


def kept_form(dtype: str) -> str | None:
    """Return the format that has the codes and scales of this dtype of GGML, or None."""
    known = is_ggml(dtype) and dtype.removeprefix(PREFIX) in _SAME
    return _SAME[dtype.removeprefix(PREFIX)][0] if known else None


def keeps(dtype: str, form: str) -> bool:
    """Return True if weights of this dtype become `form` without rounding, code by code."""
    return kept_form(dtype) == form


def keeps_rows(recipe: Recipe) -> bool:
    """Return True if a tensor is made of stored rows of one dtype, which may stay as they are."""
    return recipe.moves_rows and len({tensor.dtype for tensor in recipe.stored}) == 1


def row_bytes(tensor: SourceTensor) -> int:
    """Return the bytes of a stored row of the tensor."""
    about = _BY_NAME[tensor.dtype.removeprefix(PREFIX)]
    return tensor.shape[-1] // about.weights * about.size_bytes


def packed_rows(tensor: SourceTensor, multiple: int = BLOCK_ROWS) -> Iterator[Tensor]:
    """Yield the stored rows of a tensor, uint8 [n, row_bytes], in blocks of bounded size.

    The number of rows is a multiple of `multiple`, except at the end. A block is valid until the
    next one is taken. Raises BadCheckpoint if the file ends early.
    """
    rows, size = math.prod(tensor.shape[:-1]), row_bytes(tensor)
    step = max(1, _ITEMS // (tensor.shape[-1] * multiple)) * multiple
    buffer = bytearray(min(step, rows) * size)
    descriptor = os.open(tensor.path, os.O_RDONLY)
    try:
        for first in range(0, rows, step):
            count = min(step, rows - first)
            view = memoryview(buffer)[: count * size]
            read_exactly(descriptor, view, tensor.offset + first * size, tensor.path)
            yield torch.frombuffer(view, dtype=torch.uint8).view(count, size)
    finally:
        os.close(descriptor)


def all_packed_rows(tensor: SourceTensor) -> Tensor:
    """Return all stored rows, uint8 [R, row_bytes]."""
    return torch.cat([rows.clone() for rows in packed_rows(tensor)])


def factors_of(tensor: SourceTensor, rows: int) -> Tensor | None:
    """Return the factor of an NVFP4 tensor for each of `rows` rows, float32 [rows], else None.

    Raises BadCheckpoint if the file ends early.
    """
    if tensor.dtype != dtype_of(NVFP4):
        return None
    return torch.ones(rows) if tensor.factor is None else read_whole(tensor.factor).expand(rows)


def widen(rows: Tensor, dtype: str, factors: Tensor | None = None) -> Tensor:
    """Widen stored rows, uint8 [n, row_bytes], to float32 [n, C].

    Only products with `factors`, float32 [n] of rows of NVFP4, are rounded.
    """
    name = dtype.removeprefix(PREFIX)
    if name in TORCH_DTYPE:
        return rows.view(TORCH_DTYPE[name]).float()
    if name == NVFP4:
        about = _BY_NAME[name]
        columns = rows.shape[1] // about.size_bytes * about.weights
        return dequantise(retile(rows, dtype, factors), NVFP4, len(rows), columns)
    with np.errstate(invalid="ignore", over="ignore"):  # a hostile scale; the pull checks values
        wide = _widened(rows.numpy(), name)
    return torch.from_numpy(np.ascontiguousarray(wide, np.float32))


def retile(rows: Tensor, dtype: str, factors: Tensor | None = None) -> Tensor:
    """Sort stored rows of a type that `keeps` a form into tiles, uint8 of one dimension.

    factors: float32 [n] of rows of NVFP4, or None.
    """
    name = dtype.removeprefix(PREFIX)
    about, (form, place) = _BY_NAME[name], _SAME[name]
    blocks = rows.view(len(rows), -1, about.size_bytes)
    if form in BLOCK_BYTES:
        return retile_blocks(rows, form, blocks.shape[1] * about.weights, factors)
    scales, codes = blocks[..., place], blocks[..., place.stop :]
    if name == "Q8_0":
        codes = codes ^ 0x80  # int8 -> code - 128
    return sort_into_tiles(codes, scales, _PADDING[name])


def scales_of(rows: Tensor, dtype: str, factors: Tensor | None = None) -> Tensor:
    """Return the scales of stored rows as float32, times their factors; MXFP4's are powers of 2."""
    name = dtype.removeprefix(PREFIX)
    about, place = _BY_NAME[name], _SAME[name][1]
    raw = rows.view(len(rows), -1, about.size_bytes)[..., place].contiguous()
    if name == "MXFP4":
        return torch.ldexp(torch.ones(raw.shape), raw.int() - 127)
    if name == NVFP4:  # without sign and NaN, see tiles.h
        scales = (raw & 0x7F).clamp(max=0x7E).view(torch.float8_e4m3fn).float()
        return scales if factors is None else scales * factors[:, None, None]
    return raw.view(torch.float16).float()


def _widened(rows: np.ndarray[Any, np.dtype[np.uint8]], name: str) -> Any:
    kinds = _gguf()
    return kinds.quants.dequantize(rows, kinds.GGMLQuantizationType[name])


@cache
def _gguf() -> Any:
    import gguf  # 0.2 s

    return gguf
