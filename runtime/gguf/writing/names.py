"""Name the dense tensors of a model as llama.cpp does, in its order of rows and columns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from moeinf.runtime.gguf.architectures import ARCHITECTURES
from moeinf.runtime.gguf.writing.description import Place, Written

_BODY = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.norm.bias": "output_norm.bias",
    "lm_head.weight": "output.weight",
    "lm_head.bias": "output.bias",
}
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.(.+)")
_GATES = ("ffn_gate_inp", "ffn_gate_inp_shexp")
_EXACT = (*_GATES, "indexer.proj")  # llama.cpp wants them in F32


def places(name: str, shape: tuple[int, ...], about: Written) -> tuple[Place, ...]:
    """Return where the dense tensor `name` of this shape is written, at least one place.

    Raises KeyError for a tensor that has no name in llama.cpp.
    """
    name = re.sub(rf"^{re.escape(about.prefix)}", "model.", name)
    if name in about.made:
        return about.made[name](shape)
    if name in _BODY:
        found = [Place(_BODY[name], shape)]
        if name == "model.embed_tokens.weight" and about.copies_embedding:
            found.append(Place("output.weight", shape))
        return tuple(found)
    match = _LAYER.fullmatch(name)
    if match is None:
        raise KeyError(name)
    block, part = f"blk.{match[1]}", match[2]
    if part in about.made:
        made = about.made[part](shape)
        return tuple(replace(place, name=f"{block}.{place.name}") for place in made)
    stem, _, end = _named(part, about).rpartition(".")
    if stem in _GATES and shape[0] == 1:  # a gate of one row is a vector
        shape = shape[1:]
    heads = about.paired.get(stem, 0)
    change = (lambda rows: rows[_pairs(len(rows), heads)]) if heads else None
    return (Place(f"{block}.{stem}.{end}", shape, stem in _EXACT, change),)


def _named(part: str, about: Written) -> str:
    """Return the name inside a block of a tensor inside a layer. Raises KeyError."""
    names = _names(about.architecture)
    if part in names:
        return names[part]
    stem, dot, end = part.rpartition(".")
    return names[stem] + dot + end


@cache
def _names(architecture: str) -> Mapping[str, str]:
    """Return the names that a file of this architecture is read with, the other way round."""
    return {ours: theirs for theirs, ours in ARCHITECTURES[architecture].names.items()}


def expert_name(layer: int, role: str) -> str:
    """Return the name of the tensor with all experts' `role` of a decoder layer."""
    end = ".bias" if role.endswith("_bias") else ".weight"
    return f"blk.{layer}.ffn_{role.removesuffix('_bias')}_exps{end}"


def _pairs(rows: int, heads: int) -> NDArray[np.intp]:
    """Return the order of rows in which those that rotate together are neighbours.

    A checkpoint rotates row i of a head with row i + half; llama.cpp's "llama" 2i with 2i + 1.
    """
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
