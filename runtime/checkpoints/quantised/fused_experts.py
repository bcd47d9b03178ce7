"""Read experts from fused tensors that are transposed, interleaved, or MXFP4.

MXFP4 (OCP Microscaling Formats 1.0) as gpt-oss stores it: a matrix [R, C] has two tensors.
`X_blocks` is uint8 [R, C/32, 16], with two numbers per byte, the low nibble first. `X_scales` is
uint8 [R, C/32]. A number is its E2M1 code's value times 2^(scale - 127).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from moeinf.offload.format.tiling import tile
from moeinf.runtime.checkpoints.checkpoint import (
    TORCH_DTYPE,
    BadCheckpoint,
    Checkpoint,
    SourceTensor,
    read_exactly,
)

MXFP4 = "MXFP4"  # the dtype of a tensor that joins its blocks and scales
GROUP = 32  # weights that share a scale
_SURELY_FINITE = 252  # 6 (the largest E2M1) times this scale's 2^125 fits in a float32
_BLOCKS, _SCALES = "_blocks", "_scales"
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def join_blocks(
    checkpoint: Checkpoint, tensors: Mapping[str, SourceTensor]
) -> Mapping[str, SourceTensor]:
    """Return `tensors` with X [E, R, C] of dtype MXFP4 in place of X_blocks and X_scales.

    Scales may be in another file. Raises BadCheckpoint for scales that are missing or misshapen,
    and for X_blocks in another format: transformers saves widened weights under this name.
    """
    quantised = checkpoint.config.get("quantization_config")
    if not isinstance(quantised, Mapping) or quantised.get("quant_method") != "mxfp4":
        return tensors
    found = dict(tensors)
    for name, blocks in tensors.items():
        if not name.endswith(_BLOCKS):
            continue
        joined = name.removesuffix(_BLOCKS)
        scales = found.pop(joined + _SCALES, None)
        del found[name]
        if blocks.dtype != "U8" or len(blocks.shape) != 4 or blocks.shape[3] != GROUP // 2:
            raise BadCheckpoint(
                f"{blocks.path}: {name!r} is {list(blocks.shape)} {blocks.dtype}, not MXFP4 blocks "
                "[E, R, C/32, 16] U8; was it saved again by a program that had widened it?"
            )
        if scales is None or scales.dtype != "U8" or scales.shape != blocks.shape[:3]:
            raise BadCheckpoint(f"{blocks.path}: {name!r} has no scales of its shape")
        shape = (*blocks.shape[:2], blocks.shape[2] * GROUP)
        found[joined] = replace(blocks, name=joined, dtype=MXFP4, shape=shape, scales=scales)
    return found


def picked_values(tensor: SourceTensor) -> Tensor:
    """Return a picked tensor in its own float format, or MXFP4 as float32.

    Raises BadCheckpoint if the file ends early.
    """
    assert tensor.pick is not None
    if tensor.dtype == MXFP4:
        return widen_blocks(*_blocks_and_scales(tensor))
    raw = torch.frombuffer(bytes_of(tensor), dtype=TORCH_DTYPE[tensor.dtype])
    return _rows(tensor, raw.view(tensor.pick.shape))


def mxfp4_tiles(tensor: SourceTensor) -> tuple[Tensor, Tensor | None]:
    """Return an MXFP4 tensor as the tiles of native/kernels/tiles.h.

    Codes and scales stay unchanged. If a large scale could make a number infinite or NaN, the
    second result is the whole tensor as float32, else None. Raises BadCheckpoint for another dtype.
    """
    if tensor.dtype != MXFP4:
        raise BadCheckpoint(f"{tensor.path}: {tensor.name!r} is {tensor.dtype}, not MXFP4")
    blocks, scales = _blocks_and_scales(tensor)
    large = widen_blocks(blocks, scales) if int(scales.max()) > _SURELY_FINITE else None
    return tile_blocks(blocks, scales), large


def tile_blocks(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return blocks [R, G, 16] and scales [R, G], uint8, as tiles, uint8 of one dimension."""
    return tile(nibbles(blocks).flatten(1), scales, MXFP4)


def widen_blocks(blocks: Tensor, scales: Tensor) -> Tensor:
    """Widen blocks [R, G, 16] and scales [R, G], uint8, to [R, 32 G] float32 without loss."""
    numbers = E2M1[nibbles(blocks).int()]  # [R, G, 32]
    return torch.ldexp(numbers, scales[..., None].int() - 127).flatten(1)


def nibbles(packed: Tensor) -> Tensor:
    """Return the codes [..., 2 n] of bytes [..., n], the low nibble first."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def _blocks_and_scales(tensor: SourceTensor) -> tuple[Tensor, Tensor]:
    assert tensor.pick is not None
    assert tensor.scales is not None
    rows, columns = tensor.pick.shape
    blocks = torch.frombuffer(bytes_of(tensor), dtype=torch.uint8)
    scales = torch.frombuffer(bytes_of(tensor.scales), dtype=torch.uint8)
    groups = columns // GROUP
    return (
        _rows(tensor, blocks.view(rows, groups, GROUP // 2)),
        _rows(tensor, scales.view(rows, groups)),
    )


def _rows(tensor: SourceTensor, whole: Tensor) -> Tensor:
    pick = tensor.pick
    assert pick is not None
    if pick.transposed:
        whole = whole.T
    return whole[pick.first :: pick.step][: tensor.shape[0]].contiguous()


def bytes_of(tensor: SourceTensor) -> bytearray:
    """Return the tensor's bytes. Raises BadCheckpoint if the file ends early."""
    data = bytearray(tensor.size_bytes)
    descriptor = os.open(tensor.path, os.O_RDONLY)
    try:
        read_exactly(descriptor, memoryview(data), tensor.offset, tensor.path)
    finally:
        os.close(descriptor)
    return data
