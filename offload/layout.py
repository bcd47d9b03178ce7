"""How one expert lies in bytes: its key, its tensors, their offsets, and the size of a slot.

Does not know any file, any family, or where an expert is resident.

One expert is one run of bytes, the same on disk and in every tier:

    F32, BF16   gate_up [2F, D], rows 0 … F-1 gate, then up; down [D, F]; row-major
    Q8, Q4      gate [F, D], up [F, D], down [D, F], each in the tiles of native/tiles.h
    end         data_bytes; a slot is rounded up to whole pages

What the bytes of a format mean has a version of its own: a new tiling makes local shards of that
format old, and leaves the others as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from moeinf.native import PAGE_BYTES, matrix_bytes

LAYOUT_VERSIONS = {"F32": 1, "BF16": 1, "Q8": 2, "Q4": 2}  # by format
OLDER_VERSIONS = frozenset({("Q8", 1), ("Q4", 1)})  # what older_layouts.py can read
ITEM_BYTES = {"F32": 4, "BF16": 2}  # of the formats that are not tiled


class ExpertKey(NamedTuple):
    """A routed expert: MoE layer (flat index) and its number in that layer."""

    layer: int
    expert: int


def is_tiled(form: str) -> bool:
    """Whether weights of the format lie in tiles, quantised."""
    return form not in ITEM_BYTES


def stored_bytes(form: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor; only matrices can be tiled."""
    if is_tiled(form):
        rows, columns = shape
        return matrix_bytes(form.lower(), rows, columns)
    return math.prod(shape) * ITEM_BYTES[form]


def plain_form(form: str) -> str:
    """What a model of the format computes with, and keeps vectors and the KV cache in."""
    return "BF16" if is_tiled(form) else form


@dataclass(frozen=True)
class TensorSpan:
    """One tensor inside an expert's run of bytes; tiles are U8 of one dimension."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True)
class ExpertLayout:
    """The bytes of one expert of hidden size D and intermediate size F in format `dtype`."""

    hidden: int
    intermediate: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in LAYOUT_VERSIONS:
            raise ValueError(f"no expert layout for dtype {self.dtype!r}")

    @property
    def version(self) -> int:
        return LAYOUT_VERSIONS[self.dtype]

    @property
    def spans(self) -> tuple[TensorSpan, ...]:
        """The tensors in the order in which they lie."""
        f, d = self.intermediate, self.hidden
        if is_tiled(self.dtype):
            size = stored_bytes(self.dtype, (f, d))
            last = stored_bytes(self.dtype, (d, f))
            return (
                TensorSpan("gate", "U8", (size,), 0, size),
                TensorSpan("up", "U8", (size,), size, size),
                TensorSpan("down", "U8", (last,), 2 * size, last),
            )
        half = stored_bytes(self.dtype, (2 * f, d))
        return (
            TensorSpan("gate_up", self.dtype, (2 * f, d), 0, half),
            TensorSpan("down", self.dtype, (d, f), half, half // 2),
        )

    @property
    def data_bytes(self) -> int:
        return sum(span.size_bytes for span in self.spans)

    @property
    def slot_bytes(self) -> int:
        """data_bytes in whole pages: what a resident expert costs."""
        return -(-self.data_bytes // PAGE_BYTES) * PAGE_BYTES
