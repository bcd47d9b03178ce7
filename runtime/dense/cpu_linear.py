"""Dense linear layers on the native kernels, and embeddings, over weights of any format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from moeinf.models.base import Linear, Piece
from moeinf.native import LinearKernel, gather_rows
from moeinf.offload.store.compute import MOST_ROWS

Rows = Callable[[Tensor], Tensor]  # ids [T] -> [T, width]


class Products(Protocol):
    """Products with dense weights on their device. All tensor arguments are on that device."""

    @property
    def place(self) -> torch.device:
        """The device of the weights."""
        ...

    def tiled_linear(
        self, tiles: Tensor, form: str, out_features: int, in_features: int, bias: Tensor | None
    ) -> Linear:
        """Return the map x [T, in] -> [T, out] over Q8 or Q4 tiles, for any T."""
        ...

    def plain_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Return the map x [T, in] -> [T, out] over weight [out, in]."""
        ...

    def tiled_embedding(self, tiles: Tensor, form: str, count: int, width: int) -> Rows:
        """Return the map from ids to rows of Q8 or Q4 tiles, rounded to bfloat16."""
        ...


class DenseMath(Products, Protocol):
    """Products with dense weights on their device, and the pieces between the products."""

    def tuned(self, piece: Piece) -> Piece:
        """See models.base.Parts.tuned."""
        ...


class NativeLinear:
    """The map x [T, in] -> [T, out] over weights [out, in] in tiles, or row by row in bfloat16.

    Row by row it runs up to MOST_ROWS rows, and torch computes more.
    """

    def __init__(
        self, weights: Tensor, form: str, out_features: int, in_features: int, bias: Tensor | None
    ) -> None:
        self.kernel = LinearKernel(form, out_features, in_features, weights.data_ptr())
        self.bias = bias  # [out], added to the rounded product
        self._weights, self._plain = weights, form == "bf16"
        self._out, self._in = out_features, in_features

    def __call__(self, x: Tensor) -> Tensor:
        if self._plain and x.numel() > MOST_ROWS * self._in:
            return functional.linear(x, self._weights, self.bias)
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self._out)
        rows = out.numel() // self._out
        self.kernel.run(x.data_ptr(), rows, out.data_ptr(), x.dtype == torch.float32)
        return out if self.bias is None else out + self.bias


def tiled_linear(
    tiles: Tensor, form: str, out_features: int, in_features: int, bias: Tensor | None
) -> Linear:
    """Return the map x [T, in] -> [T, out] over Q8 or Q4 tiles, for any T."""
    return NativeLinear(tiles, form.lower(), out_features, in_features, bias)


def tiled_embedding(tiles: Tensor, form: str, count: int, width: int) -> Rows:
    """Return the map from ids to rows of Q8 or Q4 tiles, rounded to bfloat16."""

    def rows(ids: Tensor) -> Tensor:
        ids = ids.contiguous()
        out = torch.empty(len(ids), width, dtype=torch.bfloat16)
        gather_rows(
            tiles.data_ptr(), form.lower(), count, width,
            ids.data_ptr(), len(ids), out.data_ptr(), False,
        )  # fmt: skip
        return out

    return rows


def plain_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Return the map x [T, in] -> [T, out] over weight [out, in]: native if it is bfloat16."""
    if weight.dtype != torch.bfloat16:
        return lambda x: functional.linear(x, weight, bias)
    out_features, in_features = weight.shape
    return NativeLinear(weight, "bf16", out_features, in_features, bias)
