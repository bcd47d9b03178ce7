"""Define the bytes of one expert: its key, its tensors, their offsets, and the size of a slot.

One expert is one contiguous range of bytes, the same on disk and in every tier:

    F32, BF16   gate_up [2F, D], rows 0 … F-1 gate, then up; down [D, F]; row-major
    tiles       gate [F, D], up [F, D], down [D, F], each in the tiles of native/kernels/tiles.h:
                Q8, Q4, Q3, Q2, MXFP4, Q4K, Q5K, Q6K, NVFP4
    biases      where there are any: gate_up_bias [2F], down_bias [D], bf16 where weights are tiled
    end         data_bytes; a slot is rounded up to whole pages

Experts without a gate (relu, relu2) have up [F, D] and up_bias [F] instead of gate_up and gate.

Gate and up have one format, and down may have another tiled one. The experts of a layer have one
layout, and layers may differ: a model's slots are as large as its largest layout.

Each format has its own layout version. A new tiling makes local shards of that format outdated,
and leaves those of the other formats valid.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from moeinf.native import PAGE_BYTES, is_gated, matrix_bytes

_FROM_BLOCKS = dict.fromkeys(("Q4K", "Q5K", "Q6K", "NVFP4"), 1)  # interleaved blocks of a source
_NEW = {"Q3": 1, "Q2": 1, "MXFP4": 1}
LAYOUT_VERSIONS = {"F32": 1, "BF16": 1, "Q8": 2, "Q4": 2, **_NEW, **_FROM_BLOCKS}  # by format
TILE_ALIGNMENT = 64  # bytes; kernels read whole cache lines
ITEM_BYTES = {"F32": 4, "BF16": 2}  # of the formats that are not tiled


class ExpertKey(NamedTuple):
    """A routed expert: flat index of its MoE layer, and its number in that layer."""

    layer: int
    expert: int


class ExpertForms(NamedTuple):
    """The formats of an expert's matrices: that of gate and up, and that of down."""

    inner: str
    down: str


def is_tiled(form: str) -> bool:
    """Return True if the format stores weights as quantised tiles."""
    return form not in ITEM_BYTES


def stored_bytes(form: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor; only matrices can be tiled."""
    if is_tiled(form):
        rows, columns = shape
        return matrix_bytes(form.lower(), rows, columns)
    return math.prod(shape) * ITEM_BYTES[form]


def plain_form(form: str) -> str:
    """Return the format of activations, vectors and the KV cache of a model in this format."""
    return "BF16" if is_tiled(form) else form


@dataclass(frozen=True)
class TensorSpan:
    """One tensor inside an expert's bytes; tiles are U8 of one dimension."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True)
class ExpertLayout:
    """The bytes of one expert of hidden size D and intermediate size F.

    dtype: the format of gate and up. down: that of down; "": dtype. Raises ValueError for unknown
    formats, for two formats that are not both tiled, and if down's tiles would not be aligned.
    """

    hidden: int
    intermediate: int
    dtype: str
    activation: str = "swiglu"  # of native.ExpertKernel
    biased: bool = False
    down: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "down", self.down or self.dtype)
        for form in (self.dtype, self.down):
            if form not in LAYOUT_VERSIONS:
                raise ValueError(f"no expert layout for dtype {form!r}")
        is_gated(self.activation)  # raises ValueError
        if self.dtype == self.down:
            return
        if not (is_tiled(self.dtype) and is_tiled(self.down)):
            raise ValueError(f"an expert cannot have both {self.dtype} and {self.down}")
        if next(s for s in self.spans if s.name == "down").offset_bytes % TILE_ALIGNMENT:
            raise ValueError(f"{self.down} tiles after {self.dtype} ones would not be aligned")

    @property
    def version(self) -> int:
        return LAYOUT_VERSIONS[self.dtype]

    @property
    def forms(self) -> ExpertForms:
        return ExpertForms(self.dtype, self.down)

    @property
    def spans(self) -> tuple[TensorSpan, ...]:
        """The tensors, in the order of their bytes."""
        f, d = self.intermediate, self.hidden
        gated, plain = is_gated(self.activation), plain_form(self.dtype)
        inner, wide = ("gate_up", 2 * f) if gated else ("up", f)
        tensors: list[tuple[str, str, tuple[int, ...]]] = []  # name, form, shape
        if is_tiled(self.dtype):
            tensors += [(name, self.dtype, (f, d)) for name in ("gate", "up")[not gated :]]
        else:
            tensors += [(inner, self.dtype, (wide, d))]
        tensors += [("down", self.down, (d, f))]
        if self.biased:
            tensors += [(f"{inner}_bias", plain, (wide,)), ("down_bias", plain, (d,))]
        found: list[TensorSpan] = []
        offset = 0
        for name, form, shape in tensors:
            size = stored_bytes(form, shape)
            kind, seen = ("U8", (size,)) if is_tiled(form) else (form, shape)
            found.append(TensorSpan(name, kind, seen, offset, size))
            offset += size
        return tuple(found)

    @property
    def data_bytes(self) -> int:
        return sum(span.size_bytes for span in self.spans)

    @property
    def slot_bytes(self) -> int:
        """data_bytes rounded up to whole pages: the memory of a resident expert."""
        return -(-self.data_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def weights(self) -> int:
        """The number of weights in the matrices of one expert, without padding."""
        return (3 if is_gated(self.activation) else 2) * self.hidden * self.intermediate


def largest_slot_bytes(layouts: Iterable[ExpertLayout]) -> int:
    """Return the bytes of a slot that can hold an expert of any of these layouts, at least one."""
    return max(layout.slot_bytes for layout in set(layouts))
