"""Read rows of GGML's quantised formats: as they are stored, widened, or sorted into tiles.

Only pulls and exports need this file: the package gguf takes 0.2 s to import.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from moeinf.native import BLOCK_ROWS
from moeinf.offload.format.quantise import dequantise
from moeinf.offload.format.retile import BLOCK_BYTES
from moeinf.offload.format.retile import retile as retile_blocks
from moeinf.offload.format.tiling import sort_into_tiles
from moeinf.runtime.checkpoints.checkpoint import (
    TORCH_DTYPE,
    SourceTensor,
    read_exactly,
)
from moeinf.runtime.checkpoints.matrix_rows import read_whole
from moeinf.runtime.checkpoints.quantised.ggml import BY_NAME, PADDING, PREFIX, SAME, dtype_of
from moeinf.runtime.checkpoints.quantised.nvfp4 import NVFP4

_ITEMS = 1 << 20  # weights widened at a time: 4 MiB as float32


def row_bytes(tensor: SourceTensor) -> int:
    """Return the bytes of a stored row of the tensor."""
    about = BY_NAME[tensor.dtype.removeprefix(PREFIX)]
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
        about = BY_NAME[name]
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
    about, (form, place) = BY_NAME[name], SAME[name]
    blocks = rows.view(len(rows), -1, about.size_bytes)
    if form in BLOCK_BYTES:
        return retile_blocks(rows, form, blocks.shape[1] * about.weights, factors)
    scales, codes = blocks[..., place], blocks[..., place.stop :]
    if name == "Q8_0":
        codes = codes ^ 0x80  # int8 -> code - 128
    return sort_into_tiles(codes, scales, PADDING[name])


def scales_of(rows: Tensor, dtype: str, factors: Tensor | None = None) -> Tensor:
    """Return the scales of stored rows as float32, times their factors; MXFP4's are powers of 2."""
    name = dtype.removeprefix(PREFIX)
    about, place = BY_NAME[name], SAME[name][1]
    raw = rows.view(len(rows), -1, about.size_bytes)[..., place].contiguous()
    if name == "MXFP4":
        return torch.ldexp(torch.ones(raw.shape), raw.int() - 127)
    if name == NVFP4:  # without sign and NaN, see tiles.h
        scales = (raw & 0x7F).clamp(max=0x7E).view(torch.float8_e4m3fn).float()
        return scales if factors is None else scales * factors[:, None, None]
    return raw.view(torch.float16).float()


def _widened(rows: np.ndarray[Any, np.dtype[np.uint8]], name: str) -> Any:
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name])
