"""Read NVFP4 weights: E2M1 codes, an E4M3 scale per 16 of them, and one factor per matrix.

A matrix [R, C] has three tensors, in one of two spellings:

    ModelOpt            X.weight         X.weight_scale   X.weight_scale_2
    compressed-tensors  X.weight_packed  X.weight_scale   X.weight_global_scale

The codes are uint8 [R, C/2], two per byte, the low nibble first. The scales are F8_E4M3
[R, C/16]. The factor is one float32: ModelOpt multiplies by it, compressed-tensors divides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moeinf.offload.format.retile import nvfp4_blocks, retile
from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint, SourceTensor
from moeinf.runtime.checkpoints.matrix_rows import read_floats, read_rows, read_whole, row_spans
from moeinf.runtime.checkpoints.quantised.fused_experts import E2M1, nibbles

NVFP4 = "NVFP4"  # the dtype of a tensor that joins codes, scales and factor
GROUP = 16  # weights that share a scale
FACTOR, DIVISOR = "_scale_2", "_global_scale"  # ends of the factor's name


class Rows(NamedTuple):
    """Some rows of an NVFP4 matrix as stored; a weight is E2M1[code] · scale · factor."""

    codes: Tensor  # uint8 [n, C]
    scales: Tensor  # [n, C/16] float32 with the values of E4M3
    factor: float
    divides: bool  # by the factor, instead of multiplying

    def widened(self) -> Tensor:
        """Return the weights [n, C] as float32. A product with the factor is rounded once."""
        numbers = E2M1[self.codes.int()] * self.scales.repeat_interleave(GROUP, 1)  # exact
        factor = torch.tensor(self.factor)
        return numbers / factor if self.divides else numbers * factor


def nvfp4_rows(tensor: SourceTensor) -> Iterator[Rows]:
    """Yield the matrix as stored, some row blocks at a time. Raises BadCheckpoint."""
    assert tensor.scales is not None
    assert tensor.factor is not None
    factor = float(read_whole(tensor.factor)[0])
    divides = tensor.factor.name.endswith(DIVISOR)
    for first, count in row_spans(tensor):
        codes = nibbles(read_rows(tensor, first, count, torch.uint8))
        yield Rows(codes, read_floats(tensor.scales, first, count), factor, divides)


def kept_tiles(tensor: SourceTensor) -> Iterator[Tensor]:
    """Yield NVFP4 tiles with the codes and scales of the matrix, some row blocks at a time.

    A factor to divide by becomes its reciprocal, rounded once. Raises BadCheckpoint.
    """
    for rows in nvfp4_rows(tensor):
        factor = 1 / rows.factor if rows.divides and rows.factor else rows.factor
        if not math.isfinite(factor):
            raise BadCheckpoint(f"{tensor.path}: {tensor.name!r} has a factor of {rows.factor}")
        packed = rows.codes[:, ::2] | rows.codes[:, 1::2] << 4
        try:
            blocks = nvfp4_blocks(packed, rows.scales.to(torch.float8_e4m3fn))
        except ValueError as error:
            raise BadCheckpoint(f"{tensor.path}: {tensor.name!r}: {error}") from error
        factors = torch.full((len(packed),), factor, dtype=torch.float32)
        yield retile(blocks, NVFP4, tensor.shape[-1], factors)


def wide_rows(tensor: SourceTensor) -> Iterator[Tensor]:
    """Yield the weight [R, C] as float32, some row blocks at a time. Raises BadCheckpoint."""
    return (rows.widened() for rows in nvfp4_rows(tensor))
