"""Read weights packed as integers of 4 or 8 bits: the form pack-quantized of compressed-tensors.

A matrix [R, C] of B bits has up to four tensors:

    X.weight_packed      int32 [R, C·B/32]: the codes of a row, low bits first
    X.weight_scale       float [R, C/g]: the factor of each group of g weights of a row
    X.weight_zero_point  int32 [⌈R·B/32⌉, C/g], if asymmetric: the codes of 0, packed along rows
    X.weight_shape       int64 [R, C]

A weight is scale · (code - zero), where zero is 2^(B-1) without zero points. With groups of whole
32 columns, tiles have the same arithmetic. So codes and scales are kept if all scales fit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moeinf.offload.format.tiling import GROUP, ZERO, tile
from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint, SourceTensor
from moeinf.runtime.checkpoints.matrix_rows import read_floats, read_rows, read_whole, row_spans
from moeinf.runtime.checkpoints.quantised.fused_experts import nibbles

INT4, INT8 = "INT4", "INT8"  # the dtypes of tensors that join codes and scales
BITS = {INT4: 4, INT8: 8}
_KEPT_IN = {INT4: ("Q4", "Q8"), INT8: ("Q8",)}  # the formats with codes for all of them


def could_keep(tensor: SourceTensor, form: str) -> bool:
    """Return whether the format has codes for all of the tensor's: it is rounded only if need be.

    The need is a zero point, a group that does not fit, or a scale beyond float16.
    """
    return form in _KEPT_IN.get(tensor.dtype, ())


def kept_tiles(tensor: SourceTensor, form: str) -> Iterator[Tensor] | None:
    """Return the tensor as tiles of the same weights, some row blocks at a time.

    Returns None where they would differ. Raises BadCheckpoint.
    """
    if not could_keep(tensor, form) or tensor.zeros is not None or not _fits(tensor):
        return None
    return _tiles(tensor, form)


def wide_rows(tensor: SourceTensor) -> Iterator[Tensor]:
    """Yield the weight [R, C] as float32, some row blocks at a time. Raises BadCheckpoint."""
    _check_stated(tensor)
    assert tensor.scales is not None
    zeros, group = _zeros(tensor), tensor.block[1]
    for first, count in row_spans(tensor):
        codes = _codes(tensor, first, count).float()
        if zeros is None:
            codes -= _middle(tensor)
        else:
            codes -= zeros[first : first + count].repeat_interleave(group, 1)
        scales = read_floats(tensor.scales, first, count)
        yield codes.mul_(scales.repeat_interleave(group, 1))


def _tiles(tensor: SourceTensor, form: str) -> Iterator[Tensor]:
    _check_stated(tensor)
    assert tensor.scales is not None
    shift = ZERO[form] - _middle(tensor)
    groups = -(-tensor.shape[1] // GROUP)
    for first, count in row_spans(tensor):
        scales = read_floats(tensor.scales, first, count).half()
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(tensor.block[1] // GROUP, 1)
        yield tile(_codes(tensor, first, count) + shift, scales.expand(-1, groups), form)


def _fits(tensor: SourceTensor) -> bool:
    """Return whether groups are whole ones of a tile, and float16 has every scale exactly."""
    scales = tensor.scales
    assert scales is not None
    if scales.shape[1] > 1 and tensor.block[1] % GROUP:
        return False
    for first, count in row_spans(scales):
        found = read_floats(scales, first, count)
        if not torch.equal(found.half().float(), found) or not found.isfinite().all():
            return False
    return True


def _codes(tensor: SourceTensor, first: int, count: int) -> Tensor:
    """Return the codes of some rows, uint8 [count, C]."""
    packed = read_rows(tensor, first, count, torch.uint8)
    return nibbles(packed) if tensor.dtype == INT4 else packed


def _middle(tensor: SourceTensor) -> int:
    """Return the code of 0 in symmetric codes."""
    return 1 << (BITS[tensor.dtype] - 1)


def _zeros(tensor: SourceTensor) -> Tensor | None:
    """Return the zero points, uint8 [R, C/g], or None for symmetric codes."""
    if tensor.zeros is None:
        return None
    words, groups = tensor.zeros.shape
    packed = read_whole(tensor.zeros).view(words, groups).T.reshape(-1)
    raw = packed.view(torch.uint8).view(groups, -1)
    codes = nibbles(raw) if tensor.dtype == INT4 else raw
    return codes[:, : tensor.shape[0]].T


def _check_stated(tensor: SourceTensor) -> None:
    """Raise BadCheckpoint if weight_shape holds other numbers than [R, C]."""
    stated = tensor.stated
    if stated is None:
        return
    numbers = read_whole(stated).tolist()
    if numbers != list(tensor.shape):
        raise BadCheckpoint(
            f"{stated.path}: {stated.name!r} holds {numbers}, "
            f"the codes are those of {list(tensor.shape)} weights"
        )
