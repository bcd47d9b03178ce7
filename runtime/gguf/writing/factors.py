"""Write the factors of NVFP4 matrices beside them, where llama.cpp multiplies by them.

A file has one factor per matrix, float32: in `blk.0.attn_q.scale` [1], and for all experts of a
layer in `blk.0.ffn_up_exps.scale` [experts]. llama.cpp reads these tensors in every architecture,
but the graphs of most ignore those of experts.

Source: `load_tensors` in src/llama-model.cpp and the graphs in src/models of
github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moeinf.runtime.gguf.writing.description import CannotExport
from moeinf.runtime.gguf.writing.writer import FileWriter, Kind, WrittenTensor

_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_OUTPUT = ("attn_output", "output")
_ATTENTION = ("attn_q", "attn_k", "attn_v", *_OUTPUT)
_SHARED = ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")
_DELTA = ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta", "ssm_out")
# The matrices whose factors a graph applies. Other architectures: _ATTENTION.
_APPLIED = {
    "deepseek2": _OUTPUT,
    "llama": (*_ATTENTION, *_EXPERTS),
    "qwen35moe": (*_ATTENTION, *_EXPERTS, *_SHARED, *_DELTA),
    "qwen3moe": (*_ATTENTION, *_EXPERTS),
}


def applies_factor(architecture: str, name: str) -> bool:
    """Return True if llama.cpp multiplies by the factor of the matrix `name`."""
    stem = name.removesuffix(".weight").rpartition(".")[2]
    return stem in _APPLIED.get(architecture, _ATTENTION)


class Factors:
    """The factors of a file's NVFP4 matrices, known after their rows are written."""

    def __init__(self, architecture: str, matrices: list[WrittenTensor]) -> None:
        """Take the file's tensors, of any type."""
        self._architecture = architecture
        self._found: dict[str, NDArray[np.float32]] = {
            tensor.name: np.full(tensor.shape[0] if len(tensor.shape) == 3 else 1, np.nan, "<f4")
            for tensor in matrices
            if tensor.kind == Kind.NVFP4
        }
        self._written = {
            name: WrittenTensor(f"{name.removesuffix('weight')}scale", Kind.F32, found.shape)
            for name, found in self._found.items()
            if applies_factor(architecture, name)
        }

    @property
    def tensors(self) -> list[WrittenTensor]:
        """Return the tensors of factors, in the order of their matrices."""
        return [*self._written.values()]

    def add(self, name: str, factors: NDArray[np.float32], expert: int = 0) -> None:
        """Take the factors of some rows of a matrix, float32 [rows].

        Raises CannotExport if a matrix has several, or one that llama.cpp ignores.
        """
        found, factor = self._found[name], factors[0]
        if np.isnan(found[expert]):
            found[expert] = factor
        if (factors != found[expert]).any():
            raise CannotExport(f"{name}: rows of NVFP4 have several factors, a GGUF file has one")
        if name not in self._written and factor != 1:
            error = CannotExport(
                f"{name}: llama.cpp ignores the factor of NVFP4 experts in {self._architecture}"
            )
            error.hint = "the tag q8 of the model, which rounds once"
            raise error

    def write(self, file: FileWriter) -> None:
        """Write the tensors of factors. Raises OSError."""
        for name, tensor in self._written.items():
            file.write(tensor, self._found[name].view(np.uint8), 0)
