"""Name the quantised formats of GGML, which GGUF files hold; ggml_rows.py reads them.

A row is a sequence of blocks. `gguf.quants` widens all of them. Q4_0, Q8_0 and MXFP4 have groups of
32 weights with one scale, like our tiles: their codes and scales are sorted into tiles unchanged.
NVFP4 has a factor of the whole matrix in another tensor, where a file has one (gguf/checkpoint.py).
"""

from __future__ import annotations

from typing import NamedTuple

from moeinf.runtime.checkpoints.checkpoint import INTEGER_DTYPE, TORCH_DTYPE, Recipe
from moeinf.runtime.checkpoints.quantised.fused_experts import MXFP4
from moeinf.runtime.checkpoints.quantised.nvfp4 import NVFP4

PREFIX = "GGML_"  # of the dtype of a SourceTensor: GGML_Q4_K


class GgmlType(NamedTuple):
    """A type of GGML: blocks of `weights` weights in `size_bytes` bytes."""

    name: str
    weights: int
    size_bytes: int


# By number, as in ggml.h (enum ggml_type) and ggml-common.h (struct block_…).
TYPES = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136),
    26: GgmlType("I32", 1, 4),  # of DeepSeek-V4's table of experts
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17),
    40: GgmlType("NVFP4", 64, 36),
}
BY_NAME = {about.name: about for about in TYPES.values()}
# The types whose blocks are those of a tiled format: their form, and the place of their scales.
SAME = {
    "Q4_0": ("Q4", slice(0, 2)), "Q8_0": ("Q8", slice(0, 2)), "MXFP4": (MXFP4, slice(0, 1)),
    "Q4_K": ("Q4K", slice(0, 4)), "Q5_K": ("Q5K", slice(0, 4)), "Q6_K": ("Q6K", slice(208, 210)),
    "NVFP4": (NVFP4, slice(0, 4)),
}  # fmt: skip
PADDING = {"Q4_0": 0x88, "Q8_0": 0x80, "MXFP4": 0}  # codes of missing weights


def dtype_of(ggml_type: str) -> str:
    """Return the dtype of a SourceTensor: F32, F16, BF16 and I32 keep their names."""
    return ggml_type if ggml_type in TORCH_DTYPE | INTEGER_DTYPE else PREFIX + ggml_type


def is_ggml(dtype: str) -> bool:
    """Return True for a quantised format of GGML."""
    return dtype.startswith(PREFIX)


def bits_of(dtype: str) -> float:
    """Return the bits per weight of a dtype that GGUF files have."""
    about = BY_NAME[dtype.removeprefix(PREFIX)]
    return 8 * about.size_bytes / about.weights


def kept_form(dtype: str) -> str | None:
    """Return the format that has the codes and scales of this dtype of GGML, or None."""
    known = is_ggml(dtype) and dtype.removeprefix(PREFIX) in SAME
    return SAME[dtype.removeprefix(PREFIX)][0] if known else None


def keeps(dtype: str, form: str) -> bool:
    """Return True if weights of this dtype become `form` without rounding, code by code."""
    return kept_form(dtype) == form


def keeps_rows(recipe: Recipe) -> bool:
    """Return True if a tensor is made of stored rows of one dtype, which may stay as they are."""
    return recipe.moves_rows and len({tensor.dtype for tensor in recipe.stored}) == 1
