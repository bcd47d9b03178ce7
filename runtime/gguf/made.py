"""Describe the tensors that are made of stored ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from moeinf.runtime.gguf.keys import Keys

Change = Callable[[Keys], Callable[[Tensor], Tensor]]  # of the rows of one tensor


@dataclass(frozen=True)
class Modules:
    """The names in our family of the modules that predict further tokens (models/layers/mtp.py).

    layer   the beginning of the names of a module's layer, with {block} or {module}
    stem    the beginning of the names of the tensors that join it to the model
    names   name inside a block -> name after `stem`, of the tensors that are stored as they are
    made    name after `stem` -> how it is made of tensors of the block
    """

    layer: str
    stem: str
    names: Mapping[str, str]
    made: Mapping[str, Made] = field(default_factory=dict)

    def starts(self, keys: Keys, block: int) -> tuple[str, str]:
        """Return `layer` and `stem` of the module in a block."""
        number = block - keys.layers
        return self.layer.format(block=block, module=number), self.stem.format(block=block)


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
