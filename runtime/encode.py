"""The bytes of a source tensor in the format that a model is stored in.

Does not know which format a tensor should have, nor where the bytes go.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from moeinf.native import BLOCK_ROWS
from moeinf.offload.direct_file import BLOCK_BYTES
from moeinf.offload.layout import is_tiled
from moeinf.offload.quantise import quantise
from moeinf.runtime.checkpoint import (
    TORCH_DTYPE,
    SourceTensor,
    blocks,
    memory_of,
    read_exactly,
)
from moeinf.runtime.fp8 import wide_rows
from moeinf.runtime.picked import mxfp4_tiles, picked_values


def encoded(tensor: SourceTensor, form: str) -> Iterator[memoryview]:
    """The tensor in the format `form`, in blocks of bounded size; a picked one is one block.

    MXFP4 is made only of MXFP4. A block is valid until the next one is taken. Raises BadCheckpoint
    when the file ends early.
    """
    if tensor.pick is not None:
        return iter([_picked(tensor, form)])
    if tensor.scales is not None:
        return _widened(tensor, form)
    return _tiles(tensor, form) if is_tiled(form) else blocks(tensor, form)


def _picked(tensor: SourceTensor, form: str) -> memoryview:
    if form == "MXFP4":
        return memory_of(mxfp4_tiles(tensor))
    values = picked_values(tensor)
    if is_tiled(form):
        return memory_of(quantise(values.float(), form))
    return memory_of(values.to(TORCH_DTYPE[form]).view(-1))


def _widened(tensor: SourceTensor, form: str) -> Iterator[memoryview]:
    for rows in wide_rows(tensor, BLOCK_ROWS):
        if is_tiled(form):
            yield memory_of(quantise(rows, form))
        else:
            yield memory_of(rows.to(TORCH_DTYPE[form]).view(-1))


def _tiles(tensor: SourceTensor, form: str) -> Iterator[memoryview]:
    """Some row blocks at a time; float16 is widened, which loses nothing."""
    count, columns = tensor.shape
    dtype = TORCH_DTYPE[tensor.dtype]
    row_bytes = columns * dtype.itemsize
    step = max(1, BLOCK_BYTES // (row_bytes * BLOCK_ROWS)) * BLOCK_ROWS
    buffer = torch.empty(min(step, count) * columns, dtype=dtype)
    descriptor = os.open(tensor.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for first in range(0, count, step):
            rows = buffer[: min(step, count - first) * columns].view(-1, columns)
            view = memory_of(rows.view(-1))
            read_exactly(descriptor, view, tensor.offset + first * row_bytes, tensor.path)
            yield memory_of(quantise(rows.float() if dtype == torch.float16 else rows, form))
    finally:
        os.close(descriptor)
