"""Describe the tensors that are made of stored ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from moeinf.runtime.gguf.keys import Keys

Change = Callable[[Keys], Callable[[Tensor], Tensor]]  # of the rows of one tensor


@dataclass(frozen=True)
class Made:
    """How a tensor is made of stored ones, with the names inside a block.

    how takes the metadata and the parts' shapes, and returns the tensor's shape and the function
    that makes its values. Raises BadCheckpoint for parts that do not fit. moves_rows: see Recipe.
    """

    parts: tuple[str, ...]
    how: Callable[..., tuple[tuple[int, ...], Callable[..., Tensor]]]
    moves_rows: bool = False
    sliced: bool = False  # see Recipe
