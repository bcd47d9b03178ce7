"""Read weights stored as blocks of 8-bit floats with scales.

The format is that of DeepSeek-V3 (its README_WEIGHTS.md); other models use it, too. `X.weight`
[R, C] is F8_E4M3. `X.weight_scale_inv` [⌈R/a⌉, ⌈C/b⌉] holds the factor of every block of a × b
weights. The config's quantization_config gives [a, b] as weight_block_size.

DeepSeek-V4 calls the factors `X.scale`, as F8_E8M0: powers of 2. If its expert_dtype is fp4, a
weight [R, C] of an expert is MXFP4: I8 [R, C/2], two E2M1 codes per byte, the low nibble first, and
F8_E8M0 [R, C/32]. Names and forms as in transformers 5.23, finegrained_fp8.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeinf.runtime.checkpoints.checkpoint import (
    CONFIG,
    TORCH_DTYPE,
    BadCheckpoint,
    Checkpoint,
    Pick,
    SourceTensor,
    blocks,
    read_exactly,
)
from moeinf.runtime.checkpoints.quantised.fused_experts import GROUP, MXFP4, bytes_of

_WEIGHT, _SCALES = ".weight", ("_scale_inv", ".scale")
_E8M0 = "F8_E8M0"
_ITEMS = 1 << 20  # weights widened at a time: 4 MiB as float32


def join_scales(checkpoint: Checkpoint) -> Mapping[str, SourceTensor]:
    """Return the checkpoint's tensors, with each scales tensor attached to its weight.

    Scales may be in another file than their weight; a reader needs both files. Raises BadCheckpoint
    for scales that are missing or misshapen, or for an unsupported quantization_config.
    """
    quantised = checkpoint.config.get("quantization_config")
    if not isinstance(quantised, Mapping) or quantised.get("quant_method") != "fp8":
        return checkpoint.tensors
    where = checkpoint.folder / CONFIG
    fmt, sides = quantised.get("fmt", "e4m3"), quantised.get("weight_block_size")
    if fmt not in ("e4m3", "float8_e4m3fn"):
        raise BadCheckpoint(f"{where}: fmt {str(fmt)[:40]!r} of 8-bit floats is not supported")
    if not isinstance(sides, list) or len(sides) != 2 or not all(map(_is_side, sides)):
        raise BadCheckpoint(f"{where}: quantization_config has no weight_block_size [a, b]")
    found, block = dict(checkpoint.tensors), (sides[0], sides[1])
    for name, tensor in checkpoint.tensors.items():
        if len(tensor.shape) != 2:
            continue
        if tensor.dtype == "F8_E4M3":
            scales = _checked(tensor, _taken(found, name), block)
            found[name] = replace(tensor, scales=scales, block=block)
        elif tensor.dtype == "I8" and name.endswith(_WEIGHT) and _has_fp4(checkpoint.config):
            found[name] = _joined(tensor, _taken(found, name))
    return found


def _has_fp4(config: Mapping[str, Any]) -> bool:
    """Return whether the experts are FP4, which either of two places says."""
    return "fp4" in (config.get("expert_dtype"), config["quantization_config"].get("expert_dtype"))


def _taken(found: dict[str, SourceTensor], name: str) -> SourceTensor | None:
    """Remove and return the scales of a weight; None if they are missing."""
    long, short = _SCALES
    scales = found.pop(name + long, None)
    return found.pop(name.removesuffix(_WEIGHT) + short, None) if scales is None else scales


def _joined(codes: SourceTensor, scales: SourceTensor | None) -> SourceTensor:
    """Return the MXFP4 matrix of these codes and scales. Raises BadCheckpoint."""
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    shape = (rows, columns // GROUP)
    fits = scales is not None and (scales.dtype, scales.shape) == (_E8M0, shape)
    if scales is None or not fits or columns % GROUP:
        raise BadCheckpoint(
            f"{codes.path}: {codes.name!r} has no scales {list(shape)} {_E8M0} of FP4 weights"
        )
    whole = (rows, columns)
    return replace(codes, dtype=MXFP4, shape=whole, scales=scales, pick=Pick(whole))


def wide_rows(tensor: SourceTensor, multiple: int = 1) -> Iterator[Tensor]:
    """Yield the weight [R, C] as float32, some rows at a time.

    The number of rows is a multiple of `multiple`, except at the end.
    """
    assert tensor.scales is not None
    scales = _values(tensor.scales)  # [⌈R/a⌉, ⌈C/b⌉]
    rows, columns = tensor.shape
    step = max(1, _ITEMS // (columns * multiple)) * multiple
    buffer = bytearray(min(step, rows) * columns)
    descriptor = os.open(tensor.path, os.O_RDONLY)
    try:
        for first in range(0, rows, step):
            count = min(step, rows - first)
            view = memoryview(buffer)[: count * columns]
            read_exactly(descriptor, view, tensor.offset + first * columns, tensor.path)
            raw = torch.frombuffer(view, dtype=torch.float8_e4m3fn).view(count, columns)
            yield widen(raw, scales, tensor.block, first)
    finally:
        os.close(descriptor)


def widen(raw: Tensor, scales: Tensor, block: tuple[int, int], first: int = 0) -> Tensor:
    """Multiply rows of a matrix by their scales: raw [n, C] -> [n, C] float32.

    first: the row number in the matrix of the first row of `raw`.
    scales: [⌈R/a⌉, ⌈C/b⌉], of the whole matrix, with `block` = (a, b).
    """
    high, wide = block
    at = torch.arange(first, first + len(raw)) // high
    factors = scales[at].repeat_interleave(wide, 1)[:, : raw.shape[1]]  # [n, C]
    return raw.float().mul_(factors)


def sources(tensors: Iterable[SourceTensor]) -> list[SourceTensor]:
    """Return the tensors to read for these weights: the weights and what belongs to them."""
    stored = (s for t in tensors for s in (t.recipe.stored if t.recipe else (t,)))
    return [
        piece
        for t in stored
        for piece in (t, t.scales, t.factor, t.zeros, t.stated)
        if piece is not None
    ]


def files_of(tensor: SourceTensor) -> set[Path]:
    """Return the files that hold the tensor and what belongs to it."""
    return {piece.path for piece in sources([tensor])}


def _is_side(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 20


def _checked(
    tensor: SourceTensor, scales: SourceTensor | None, block: tuple[int, int]
) -> SourceTensor:
    if scales is None:
        raise BadCheckpoint(f"{tensor.path}: {tensor.name!r} has no scales")
    shape = tuple(-(-side // step) for side, step in zip(tensor.shape, block, strict=True))
    if scales.shape != shape or scales.dtype not in (*TORCH_DTYPE, _E8M0):
        raise BadCheckpoint(
            f"{scales.path}: {scales.name!r} is {list(scales.shape)} {scales.dtype}, "
            f"not {list(shape)} of a float format"
        )
    return scales


def _values(tensor: SourceTensor) -> Tensor:
    """Return the whole tensor as float32. Scales are few: one per 16384 weights (128 × 128)."""
    if tensor.dtype == _E8M0:
        powers = torch.frombuffer(bytes_of(tensor), dtype=torch.uint8).int() - 127
        return torch.ldexp(torch.ones(len(powers)), powers).view(tensor.shape)
    data = bytearray().join(blocks(tensor, "F32"))
    return torch.frombuffer(data, dtype=torch.float32).view(tensor.shape)
