"""Restore the tensors of Kimi-Linear: llama.cpp stores decay rates as -exp(A_log)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from moeinf.runtime.gguf.families.latent import KV_B
from moeinf.runtime.gguf.keys import Keys
from moeinf.runtime.gguf.made import Made

_Sides = tuple[int, ...]
_Make = Callable[[Tensor], Tensor]


def _rates(keys: Keys, _sides: _Sides) -> tuple[_Sides, _Make]:
    shape = 1, 1, keys.count("attention.head_count"), 1
    return shape, lambda values: (-values).log().view(shape)


def flat_rates(keys: Keys, _sides: _Sides) -> tuple[_Sides, _Make]:
    """Restore the decay rates of GLM-5.3-Flash: one number for each head."""
    shape = (keys.count("attention.head_count"),)
    return shape, lambda values: (-values).log().view(shape)


def _steps(_keys: Keys, sides: _Sides) -> tuple[_Sides, _Make]:
    return sides, lambda values: values


def _kernel(keys: Keys, _sides: _Sides) -> tuple[_Sides, _Make]:
    channels = keys.count("attention.head_count") * keys.count("kda.head_dim")
    shape = channels, 1, keys.count("ssm.conv_kernel")
    return shape, lambda values: values.view(shape)


KIMI_NAMES = {
    "ssm_f_a": "self_attn.f_a_proj",
    "ssm_f_b": "self_attn.f_b_proj",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_norm": "self_attn.o_norm",
}
KIMI_MADE = {
    "self_attn.kv_b_proj.weight": KV_B,
    "self_attn.A_log": Made(("ssm_a",), _rates),
    "self_attn.dt_bias": Made(("ssm_dt.bias",), _steps),
    **{
        f"self_attn.{word}_conv1d.weight": Made((f"ssm_conv1d_{word}.weight",), _kernel)
        for word in "qkv"
    },
}
