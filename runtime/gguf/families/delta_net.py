"""Restore the tensors of Qwen3.5 and Qwen3-Next, which llama.cpp stores in another order.

Several value heads share a key head. A checkpoint of Qwen3.5 has them side by side; llama.cpp has
first one of each key head, then the second ones. In Qwen3-Next a checkpoint has one input matrix
with the rows of a key head side by side: q, k, its value heads, their gates. llama.cpp has all q,
all k and all values in one matrix, and the gates in another.

Norms are stored plus 1, decay rates as -exp(A_log).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeinf.runtime.gguf.families.usual import body, qwen_experts
from moeinf.runtime.gguf.keys import Keys
from moeinf.runtime.gguf.made import Change, Made, Modules

_Sides = tuple[int, ...]
_Make = Callable[[Tensor], Tensor]


def _sizes(keys: Keys) -> tuple[int, int, int]:
    """Return the numbers of key heads and value heads, and the width of a value head."""
    key_heads, heads = keys.count("ssm.group_count"), keys.count("ssm.time_step_rank")
    width, rest = divmod(keys.count("ssm.inner_size"), heads)
    if heads % key_heads or rest:
        raise keys.bad("has value heads that do not fit its key heads")
    return key_heads, heads, width


def _grouped(rows: Tensor, key_heads: int, heads: int) -> Tensor:
    """Sort the rows of value heads: [0 of each key head, 1 of each, …] -> by key head."""
    whole = rows.reshape(heads // key_heads, key_heads, -1, *rows.shape[1:])
    return whole.transpose(0, 1).reshape(rows.shape)


def _values_grouped(keys: Keys) -> _Make:
    """Return a function that sorts the value heads' rows, the last ones; Q and K come before."""
    key_heads, heads, width = _sizes(keys)

    def make(rows: Tensor) -> Tensor:
        first = len(rows) - heads * width
        if first < 0:
            raise keys.bad(f"has a tensor of {len(rows)} rows for {heads} value heads")
        return torch.cat((rows[:first], _grouped(rows[first:], key_heads, heads)))

    return make


def _heads_grouped(keys: Keys) -> _Make:
    """Return a function that sorts one row per value head."""
    key_heads, heads, _ = _sizes(keys)

    def make(rows: Tensor) -> Tensor:
        if len(rows) != heads:
            raise keys.bad(f"has a tensor of {len(rows)} rows for {heads} value heads")
        return _grouped(rows, key_heads, heads)

    return make


def _output(keys: Keys, sides: _Sides) -> tuple[_Sides, _Make]:
    make = _values_grouped(keys)  # of columns
    return sides, lambda values: make(values.T).T


def _rates(keys: Keys, sides: _Sides) -> tuple[_Sides, _Make]:
    make = _heads_grouped(keys)
    return sides, lambda values: make((-values).log())


def _steps(keys: Keys, sides: _Sides) -> tuple[_Sides, _Make]:
    return sides, _heads_grouped(keys)


def _kernel(keys: Keys, sides: _Sides) -> tuple[_Sides, _Make]:
    return (sides[0], 1, sides[-1]), _values_grouped(keys)


def _inputs(keys: Keys, mixed: _Sides, gates: _Sides) -> tuple[_Sides, Callable[..., Tensor]]:
    """Put the rows of a key head side by side, from [q, k, v of all heads] and [z of all heads]."""
    key_heads, heads, width = _sizes(keys)
    values = heads * width
    if mixed[0] <= values or (mixed[0] - values) % (2 * key_heads) or gates != (values, *mixed[1:]):
        raise keys.bad("has attn_qkv and attn_gate of shapes that do not fit")

    def make(qkv: Tensor, z: Tensor) -> Tensor:
        one = (len(qkv) - values) // 2
        parts = (*torch.split(qkv, [one, one, values]), z)
        grouped = [part.reshape(key_heads, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, 1).reshape(-1, *qkv.shape[1:])

    return (mixed[0] + values, *mixed[1:]), make


def _plain_rates(_keys: Keys, sides: _Sides) -> tuple[_Sides, _Make]:
    return sides, lambda values: (-values).log()


def plain_kernel(_keys: Keys, sides: _Sides) -> tuple[_Sides, _Make]:
    """Restore the middle side of a convolution's kernel [channels, 1, kernel]."""
    shape = sides[0], 1, sides[-1]
    return shape, lambda values: values.view(shape)


def minus_one(_keys: Keys, sides: _Sides) -> tuple[_Sides, _Make]:
    """Restore a norm that is stored plus 1."""
    return sides, partial(torch.add, other=-1.0)


def qwen35_config(keys: Keys, model_type: str = "qwen3_5_moe_text") -> dict[str, Any]:
    """Return config.json of Qwen3.5, or of a model with its layers."""
    heads = keys.count("ssm.time_step_rank")
    kinds = {True: "linear_attention", False: "full_attention"}
    return (
        body(keys, model_type)
        | qwen_experts(keys)
        | {
            "attention_bias": keys.side("attn_q.bias", 0) is not None,
            "rope_parameters": keys.partial_rope(),
            "mtp_num_hidden_layers": keys.modules,
            "linear_num_key_heads": keys.get("ssm.group_count"),
            "linear_num_value_heads": heads,
            "linear_key_head_dim": keys.get("ssm.state_size"),
            "linear_value_head_dim": keys.count("ssm.inner_size") // heads,
            "linear_conv_kernel_dim": keys.get("ssm.conv_kernel"),
            "layer_types": [kinds[keys.has_tensor("ssm_a", b)] for b in range(keys.layers)],
        }
    )


DELTA_NAMES = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_norm": "linear_attn.norm",
}
DELTA_MOVES: dict[str, Change] = {
    "attn_qkv": _values_grouped,
    "attn_gate": _values_grouped,
    "ssm_alpha": _heads_grouped,
    "ssm_beta": _heads_grouped,
}
_NORMS = {
    "input_layernorm.weight": Made(("attn_norm.weight",), minus_one),
    "post_attention_layernorm.weight": Made(("post_attention_norm.weight",), minus_one),
    "self_attn.q_norm.weight": Made(("attn_q_norm.weight",), minus_one),
    "self_attn.k_norm.weight": Made(("attn_k_norm.weight",), minus_one),
}
DELTA_MADE = {
    "linear_attn.out_proj.weight": Made(("ssm_out.weight",), _output, sliced=True),
    "linear_attn.A_log": Made(("ssm_a",), _rates),
    "linear_attn.dt_bias": Made(("ssm_dt.bias",), _steps),
    "linear_attn.conv1d.weight": Made(("ssm_conv1d.weight",), _kernel),
    **_NORMS,
}
NEXT_NAMES = {
    "ssm_in": "linear_attn.in_proj_qkvz",  # in files of 2025
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_dt.bias": "linear_attn.dt_bias",
}
NEXT_MADE = {
    "linear_attn.in_proj_qkvz.weight": Made(
        ("attn_qkv.weight", "attn_gate.weight"), _inputs, moves_rows=True
    ),
    "linear_attn.A_log": Made(("ssm_a",), _plain_rates),
    "linear_attn.conv1d.weight": Made(("ssm_conv1d.weight",), plain_kernel),
    **_NORMS,
}
IN_QWEN = Modules(
    "mtp.layers.{module}.",
    "mtp.",
    {"nextn.eh_proj": "fc"},
    {
        "pre_fc_norm_embedding.weight": Made(("nextn.enorm.weight",), minus_one),
        "pre_fc_norm_hidden.weight": Made(("nextn.hnorm.weight",), minus_one),
        "norm.weight": Made(("nextn.shared_head_norm.weight",), minus_one),
    },
)
