"""Name the dense tensors of a model as llama.cpp does, in its order of rows and columns."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moeinf.runtime.gguf.writing.description import Place, Written

_BODY = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.norm.bias": "output_norm.bias",
    "lm_head.weight": "output.weight",
    "lm_head.bias": "output.bias",
}
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.(.+)")
_STEMS = {  # of a layer's tensors
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "residual_layernorm": "ffn_norm",
    "residual_mlp.w1": "ffn_gate",
    "residual_mlp.w2": "ffn_down",
    "residual_mlp.w3": "ffn_up",
    "shared_mlp.output_linear": "ffn_down_shexp",
    "linear_attn.norm": "ssm_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    **{f"mlp.shared_expert.{role}_proj": f"ffn_{role}_shexp" for role in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{role}_proj": f"ffn_{role}_shexp" for role in ("gate", "up", "down")},
}
_PARTS = {f"{stem}{end}": (stem, end) for stem in _STEMS for end in (".weight", ".bias")} | {
    "self_attn.sinks": ("attn_sinks", ".weight"),
    "mlp.gate.e_score_correction_bias": ("exp_probs_b", ".bias"),
}
_GATES = ("ffn_gate_inp", "ffn_gate_inp_shexp")  # llama.cpp wants them in F32


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
    inner, end = _PARTS[part]
    stem = about.renamed.get(inner, _STEMS.get(inner, inner))
    if stem in _GATES and shape[0] == 1:  # a gate of one row is a vector
        shape = shape[1:]
    heads = about.paired.get(stem, 0)
    change = (lambda rows: rows[_pairs(len(rows), heads)]) if heads else None
    return (Place(f"{block}.{stem}{end}", shape, stem in _GATES, change),)


def expert_name(layer: int, role: str) -> str:
    """Return the name of the tensor with all experts' `role` of a decoder layer."""
    end = ".bias" if role.endswith("_bias") else ".weight"
    return f"blk.{layer}.ffn_{role.removesuffix('_bias')}_exps{end}"


def _pairs(rows: int, heads: int) -> NDArray[np.intp]:
    """Return the order of rows in which those that rotate together are neighbours.

    A checkpoint rotates row i of a head with row i + half; llama.cpp's "llama" 2i with 2i + 1.
    """
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
