"""Read some rows of a stored matrix at a time, as they are."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import Tensor

from moeinf.native import BLOCK_ROWS
from moeinf.runtime.checkpoints.checkpoint import SourceTensor, read_exactly

_ITEMS = 1 << 20  # weights widened at a time: 4 MiB as float32
_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}


def read_rows(tensor: SourceTensor, first: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return rows first … first + count - 1 of a matrix, its bytes read as `dtype`.

    Raises BadCheckpoint if the file ends early.
    """
    row_bytes = tensor.size_bytes // tensor.shape[0]
    data = bytearray(count * row_bytes)
    descriptor = os.open(tensor.path, os.O_RDONLY)
    try:
        at = tensor.offset + first * row_bytes
        read_exactly(descriptor, memoryview(data), at, tensor.path)
    finally:
        os.close(descriptor)
    return torch.frombuffer(data, dtype=dtype).view(count, -1)


def read_floats(tensor: SourceTensor, first: int, count: int) -> Tensor:
    """Return rows of a matrix of a float format as float32. Raises BadCheckpoint."""
    return read_rows(tensor, first, count, _DTYPES[tensor.dtype]).float()


def read_whole(tensor: SourceTensor) -> Tensor:
    """Return all numbers of a tensor in one dimension. Raises BadCheckpoint."""
    flat = (1, *tensor.shape)
    whole = SourceTensor(
        tensor.name, tensor.dtype, flat, tensor.path, tensor.offset, tensor.size_bytes
    )
    return read_rows(whole, 0, 1, _DTYPES[tensor.dtype])[0]


def row_spans(tensor: SourceTensor) -> Iterator[tuple[int, int]]:
    """Yield (first row, count) of steps through a matrix [R, C]: whole row blocks of tiles."""
    rows, columns = tensor.shape
    step = max(1, _ITEMS // (columns * BLOCK_ROWS)) * BLOCK_ROWS
    for first in range(0, rows, step):
        yield first, min(step, rows - first)
