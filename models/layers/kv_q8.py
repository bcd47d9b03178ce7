"""Rows of the KV cache in q8: one head of one token, in blocks of 32 values with a scale each.

    | scale | 32 × int8 | scale | 32 × int8 | …        value = int8 · scale
       2         32          2         32               scale = max |x| / 127, as bfloat16

The last block has the values that are left; a row has an even number of bytes. Every block is
quantised alone, so other tokens never change a value. A value is at most scale / 2 off. GGML's q8_0
differs in the scale alone, which is float16 there. native/attention/kv_q8.h writes the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

VALUES = 32  # of a block
_SCALE_BYTES = 2
_BLOCK_BYTES = _SCALE_BYTES + VALUES
_LEAST = 2.0**-100  # a block of smaller values becomes zeros


def row_bytes(width: int) -> int:
    """Return the bytes of a row of `width` values."""
    whole, rest = divmod(width, VALUES)
    return whole * _BLOCK_BYTES + (_SCALE_BYTES + rest + rest % 2 if rest else 0)


def quantised(x: Tensor) -> Tensor:
    """Map values [..., width] to rows [..., row_bytes(width)] uint8.

    A block with NaN or infinity has no finite value afterwards.
    """
    width = x.shape[-1]
    x = functional.pad(x.float(), (0, -width % VALUES))
    x = torch.unflatten(x, -1, (-1, VALUES))  # [..., B, 32]
    top = x.abs().amax(-1, keepdim=True)
    scale = torch.where(top < _LEAST, 0.0, top * (1.0 / 127.0)).to(torch.bfloat16)  # [..., B, 1]
    usual = scale.isfinite() & (scale != 0)
    factor = torch.where(usual, 1.0 / scale.float(), 0.0)
    whole = torch.where(usual, x * factor, (scale != 0).float())
    whole = whole.round().clamp(-127, 127).to(torch.int8)
    rows = torch.cat((scale.view(torch.uint8), whole.view(torch.uint8)), -1)
    return rows.flatten(-2)[..., : row_bytes(width)]


def widened(rows: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Map rows [..., row_bytes(width)] uint8 to values [..., width]."""
    out = rows.new_empty(*rows.shape[:-1], width, dtype=dtype)
    whole = width // VALUES
    if whole:
        blocks = torch.unflatten(rows[..., : whole * _BLOCK_BYTES], -1, (whole, _BLOCK_BYTES))
        _widen(blocks, torch.unflatten(out[..., : whole * VALUES], -1, (whole, VALUES)))
    if width % VALUES:
        _widen(rows[..., whole * _BLOCK_BYTES :], out[..., whole * VALUES :])
    return out


def _widen(blocks: Tensor, out: Tensor) -> None:
    """Set out [..., n] to the values of blocks [..., 2 + n] uint8."""
    scale = blocks[..., :_SCALE_BYTES].view(torch.bfloat16).to(out.dtype)  # [..., 1]
    values = blocks[..., _SCALE_BYTES : _SCALE_BYTES + out.shape[-1]].view(torch.int8)
    torch.mul(values.to(out.dtype), scale, out=out)  # exact in float32, rounded once in bfloat16
