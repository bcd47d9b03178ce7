"""How one expert lies in bytes: its key, its tensors, their offsets, and the size of a slot.

Does not know any file, any family, or where an expert is resident.

One expert is one run of bytes, the same on disk and in every tier:

    offset 0                 gate_up   [2F, D]   rows 0 … F-1 are gate, rows F … 2F-1 are up
    offset 2·F·D·itemsize    down      [D, F]
    data_bytes               end; a slot is rounded up to whole pages

A new order, tiling or quantisation is a new LAYOUT_VERSION: local shards are then re-tiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from moeinf.native import PAGE_BYTES

LAYOUT_VERSION = 1
ITEM_BYTES = {"F32": 4, "BF16": 2}  # safetensors names of the formats a shard can hold


class ExpertKey(NamedTuple):
    """A routed expert: MoE layer (flat index) and its number in that layer."""

    layer: int
    expert: int


@dataclass(frozen=True)
class TensorSpan:
    """One tensor inside an expert's run of bytes."""

    name: str
    shape: tuple[int, int]
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True)
class ExpertLayout:
    """The bytes of one expert of hidden size D and intermediate size F in format `dtype`."""

    hidden: int
    intermediate: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"no expert layout for dtype {self.dtype!r}")

    @property
    def spans(self) -> tuple[TensorSpan, TensorSpan]:
        """gate_up and down, in the order in which they lie."""
        half = 2 * self.intermediate * self.hidden * ITEM_BYTES[self.dtype]
        return (
            TensorSpan("gate_up", (2 * self.intermediate, self.hidden), 0, half),
            TensorSpan("down", (self.hidden, self.intermediate), half, half // 2),
        )

    @property
    def data_bytes(self) -> int:
        return sum(span.size_bytes for span in self.spans)

    @property
    def slot_bytes(self) -> int:
        """data_bytes in whole pages: what a resident expert costs."""
        return -(-self.data_bytes // PAGE_BYTES) * PAGE_BYTES
