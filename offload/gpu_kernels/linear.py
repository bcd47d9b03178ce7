"""Compute dense linear layers and embeddings on the device, for weights of any format.

The interfaces are those of runtime/dense/cpu_linear.py. Up to 16 rows (with tiles, any number) get
the bits of the CPU, independent of the other rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor
from torch.nn import functional

from moeinf.offload.gpu_kernels.expert_ffn import (
    INTERPRETED,
    LANES,
    STAGES,
    Activations,
    rows_of_block,
    tiles_of,
    warps_of,
)
from moeinf.offload.gpu_kernels.expert_kernels import gather_rows, linear_rows
from moeinf.offload.gpu_kernels.grouped_gemm import linear_many
from moeinf.offload.gpu_kernels.tiles import FUSION
from moeinf.offload.store.compute import MOST_ROWS

_OUTPUTS = 32  # outputs of a program of up to MOST_ROWS rows; more use tensor cores (tiles)
_COLUMNS = 512  # columns of an embedding that one program reads


def tiled_linear(
    tiles: Tensor, form: str, out_features: int, in_features: int, bias: Tensor | None
) -> Callable[[Tensor], Tensor]:
    """Return x [T, in] -> [T, out] for tiles in device memory, aligned to 16 bytes."""
    words = tiles.view(torch.int32)
    return lambda x: _run(words, form.lower(), x, out_features, in_features, bias)


def plain_linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return x [T, in] -> [T, out] for weight [out, in]; our kernel computes bf16 up to 16 rows."""
    out_features, in_features = weight.shape

    def apply(x: Tensor) -> Tensor:
        if weight.dtype != torch.bfloat16 or x.numel() > MOST_ROWS * in_features:
            return functional.linear(x, weight, bias)
        return _run(weight, "bf16", x, out_features, in_features, bias)

    return apply


def tiled_embedding(tiles: Tensor, form: str, count: int, width: int) -> Callable[[Tensor], Tensor]:
    """Return ids [T] -> rows [T, width] of tiles, rounded once to bfloat16. MXFP4 is excluded.

    Ids must be in 0 … count - 1. They are not checked, because the host does not read them.
    """
    words = tiles.view(torch.int32)

    def rows(ids: Tensor) -> Tensor:
        out = torch.empty(len(ids), width, dtype=torch.bfloat16, device=tiles.device)
        gather_rows[(len(ids), triton.cdiv(width, _COLUMNS))](
            words, tiles, ids.contiguous(), out, width, tiles_of(width, form.lower()),
            FORM=form.lower(), COLUMNS=_COLUMNS, num_warps=4, **FUSION,
        )  # fmt: skip
        return out

    return rows


def _run(
    words: Tensor, form: str, x: Tensor, out_features: int, in_features: int, bias: Tensor | None
) -> Tensor:
    inputs = Activations.of(x.reshape(-1, in_features), form)
    out = x.new_empty(*x.shape[:-1], out_features)
    count = out.numel() // out_features
    if form != "bf16" and count > MOST_ROWS:
        rows = rows_of_block(count, form=form)
        linear_many[(triton.cdiv(out_features, LANES), triton.cdiv(count, rows))](
            words, inputs.codes, inputs.scales, out, count, out_features,
            tiles_of(in_features, form),
            FORM=form, ROWS=rows, LANES=LANES, STAGES=STAGES, num_warps=warps_of(rows), **FUSION,
        )  # fmt: skip
        return out if bias is None else out + bias
    rows = min(MOST_ROWS, triton.next_power_of_2(count))
    linear_rows[(triton.cdiv(out_features, _OUTPUTS), triton.cdiv(count, rows))](
        words, inputs.words, inputs.starts, inputs.scales, out,
        count, out_features, in_features, tiles_of(in_features, form),
        FORM=form, ROWS=rows, LANES=_OUTPUTS, STAGES=STAGES, EMULATE=INTERPRETED,
        num_warps=4 if rows < 8 else 8, **FUSION,
    )  # fmt: skip
    return out if bias is None else out + bias
