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
    Recipe,
    SourceTensor,
    blocks,
    memory_of,
    read_exactly,
)
from moeinf.runtime.checkpoints.quantised import fp8, nvfp4, packed_integers
from moeinf.runtime.checkpoints.quantised.fused_experts import mxfp4_tiles, picked_values
from moeinf.runtime.checkpoints.quantised.ggml import is_ggml, keeps, keeps_rows
from moeinf.runtime.checkpoints.quantised.ggml_rows import (
    all_packed_rows,
    factors_of,
    packed_rows,
    retile,
    scales_of,
    widen,
)

Look = Callable[[SourceTensor, Tensor, str], None]  # (tensor, values, format), before encoding


def unseen(tensor: SourceTensor, values: Tensor, form: str) -> None:
    """Accept all values."""


def encoded(tensor: SourceTensor, form: str, look: Look = unseen) -> Iterator[memoryview]:
    """Return the tensor in the format `form`, in blocks of bounded size.

    A tensor with a `pick` or a `recipe` is one block. `look` gets all values before they are
    encoded, or the scales of a format of GGML that is kept, but not those of other tiles that keep
    the source's codes and scales; its exceptions propagate. MXFP4 is made
    only from MXFP4. A block is valid until the next one is taken. Raises BadCheckpoint if the file
    ends early.
    """
    if tensor.recipe is not None:
        return iter([_cooked(tensor, tensor.recipe, form, look)])
    if tensor.pick is not None:
        return iter([_picked(tensor, form, look)])
    if is_ggml(tensor.dtype):
        return (
            _of_ggml(tensor, rows, factors_of(tensor, len(rows)), form, look)
            for rows in packed_rows(tensor)
        )
    if tensor.scales is not None:
        return _joined(tensor, form, look)
    return _tiles(tensor, form, look) if is_tiled(form) else _plain(tensor, form, look)


def _picked(tensor: SourceTensor, form: str, look: Look) -> memoryview:
    if form == "MXFP4":
        tiles, large = mxfp4_tiles(tensor)
        if large is not None:
            look(tensor, large, form)
        return memory_of(tiles)
    values = picked_values(tensor)
    return _stored(tensor, values, form, look)


def _cooked(tensor: SourceTensor, recipe: Recipe, form: str, look: Look) -> memoryview:
    stored = recipe.stored
    rows = [all_packed_rows(piece) for piece in stored]
    factors = [factors_of(piece, len(r)) for piece, r in zip(stored, rows, strict=True)]
    if keeps_rows(recipe) and keeps(stored[0].dtype, form):
        moved = None if factors[0] is None else recipe.make(*factors)
        return _of_ggml(stored[0], recipe.make(*rows).contiguous(), moved, form, look)
    each = zip(rows, stored, factors, strict=True)
    wide = (widen(r, p.dtype, f).view(p.shape) for r, p, f in each)
    return _stored(tensor, recipe.make(*wide).reshape(tensor.shape), form, look)


def _of_ggml(
    tensor: SourceTensor, rows: Tensor, factors: Tensor | None, form: str, look: Look
) -> memoryview:
    """Return stored rows of a format of GGML; as tiles of the same codes where the form fits."""
    if not keeps(tensor.dtype, form):
        return _stored(tensor, widen(rows, tensor.dtype, factors), form, look)
    scales = scales_of(rows, tensor.dtype, factors)
    large = scales.abs().max() > 2.0**125  # MXFP4 and NVFP4: 6 times it is infinite
    look(tensor, widen(rows, tensor.dtype, factors) if large else scales, form)
    return memory_of(retile(rows, tensor.dtype, factors))


def _stored(tensor: SourceTensor, values: Tensor, form: str, look: Look) -> memoryview:
    look(tensor, values, form)
    if is_tiled(form):
        return memory_of(quantise(values.float().contiguous(), form))
    return memory_of(values.to(TORCH_DTYPE[form]).contiguous().view(-1))


def _plain(tensor: SourceTensor, form: str, look: Look) -> Iterator[memoryview]:
    for block in blocks(tensor, form):
        look(tensor, torch.frombuffer(block, dtype=TORCH_DTYPE[form]), form)
        yield block


def _joined(tensor: SourceTensor, form: str, look: Look) -> Iterator[memoryview]:
    """Yield a matrix with scales: its codes where the format keeps them, else its weights."""
    if form == tensor.dtype == nvfp4.NVFP4:
        yield from map(memory_of, nvfp4.kept_tiles(tensor))
        return
    kept = packed_integers.kept_tiles(tensor, form)
    if kept is not None:
        yield from map(memory_of, kept)
        return
    for rows in _wide_rows(tensor):
        yield _stored(tensor, rows, form, look)


def _wide_rows(tensor: SourceTensor) -> Iterator[Tensor]:
    """Yield the weights as float32, some row blocks of tiles at a time."""
    if tensor.dtype == nvfp4.NVFP4:
        return nvfp4.wide_rows(tensor)
    if tensor.dtype in packed_integers.BITS:
        return packed_integers.wide_rows(tensor)
    return fp8.wide_rows(tensor, BLOCK_ROWS)


def _tiles(tensor: SourceTensor, form: str, look: Look) -> Iterator[memoryview]:
    """Yield tiles, some row blocks at a time. float16 is widened to float32 without loss."""
    count, columns = tensor.shape
    dtype = TORCH_DTYPE[tensor.dtype]
    row_bytes = columns * dtype.itemsize
    step = max(1, BLOCK_BYTES // (row_bytes * BLOCK_ROWS)) * BLOCK_ROWS
    buffer = torch.empty(min(step, count) * columns, dtype=dtype)
    descriptor = os.open(tensor.path, os.O_RDONLY)
    try:
        for first in range(0, count, step):
            rows = buffer[: min(step, count - first) * columns].view(-1, columns)
            view = memory_of(rows.view(-1))
            read_exactly(descriptor, view, tensor.offset + first * row_bytes, tensor.path)
            look(tensor, rows, form)
            yield memory_of(quantise(rows.float() if dtype == torch.float16 else rows, form))
    finally:
        os.close(descriptor)
