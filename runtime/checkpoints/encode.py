"""Convert source tensors to the format of a stored model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from moeinf.native import BLOCK_ROWS
from moeinf.offload.format.direct_io import BLOCK_BYTES
from moeinf.offload.format.layout import is_tiled
from moeinf.offload.format.quantise import quantise
from moeinf.runtime.checkpoints.checkpoint import (
    TORCH_DTYPE,
    SourceTensor,
    blocks,
    memory_of,
    read_exactly,
)
from moeinf.runtime.checkpoints.fp8 import wide_rows
from moeinf.runtime.checkpoints.fused_experts import mxfp4_tiles, picked_values

Look = Callable[[SourceTensor, Tensor, str], None]  # (tensor, values, format), before encoding


def unseen(tensor: SourceTensor, values: Tensor, form: str) -> None:
    """Accept all values."""


def encoded(tensor: SourceTensor, form: str, look: Look = unseen) -> Iterator[memoryview]:
    """Return the tensor in the format `form`, in blocks of bounded size.

    A tensor with a `pick` is one block. `look` gets all values before they are encoded; its
    exceptions propagate. MXFP4 is made only from MXFP4. A block is valid until the next one is
    taken. Raises BadCheckpoint if the file ends early.
    """
    if tensor.pick is not None:
        return iter([_picked(tensor, form, look)])
    if tensor.scales is not None:
        return _widened(tensor, form, look)
    return _tiles(tensor, form, look) if is_tiled(form) else _plain(tensor, form, look)


def _picked(tensor: SourceTensor, form: str, look: Look) -> memoryview:
    if form == "MXFP4":
        tiles, large = mxfp4_tiles(tensor)
        if large is not None:
            look(tensor, large, form)
        return memory_of(tiles)
    values = picked_values(tensor)
    look(tensor, values, form)
    if is_tiled(form):
        return memory_of(quantise(values.float(), form))
    return memory_of(values.to(TORCH_DTYPE[form]).view(-1))


def _plain(tensor: SourceTensor, form: str, look: Look) -> Iterator[memoryview]:
    for block in blocks(tensor, form):
        look(tensor, torch.frombuffer(block, dtype=TORCH_DTYPE[form]), form)
        yield block


def _widened(tensor: SourceTensor, form: str, look: Look) -> Iterator[memoryview]:
    for rows in wide_rows(tensor, BLOCK_ROWS):
        look(tensor, rows, form)
        if is_tiled(form):
            yield memory_of(quantise(rows, form))
        else:
            yield memory_of(rows.to(TORCH_DTYPE[form]).view(-1))


def _tiles(tensor: SourceTensor, form: str, look: Look) -> Iterator[memoryview]:
    """Yield tiles, some row blocks at a time. float16 is widened to float32 without loss."""
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
            look(tensor, rows, form)
            yield memory_of(quantise(rows.float() if dtype == torch.float16 else rows, form))
    finally:
        os.close(descriptor)
