"""Change the tensors of delta layers as llama.cpp's converter does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def kimi(name: str, values: Tensor) -> tuple[str, Tensor]:
    """Change a tensor as KimiLinearModel does."""
    if name.endswith("_conv1d.weight"):
        return name, values[None]
    if name.endswith(".A_log"):
        return name, -values.exp()
    name = re.sub(r"block_sparse_moe\.(?=\w+_proj\.)", "mlp.", name)  # a dense layer, as published
    return name.replace(".dt_bias", ".dt_proj.bias"), values


def delta(name: str, values: Tensor, config: Mapping[str, Any]) -> tuple[str, Tensor]:
    """Change a tensor as Qwen3NextModel and _LinearAttentionVReorderBase do."""
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    keys, width = config["linear_key_head_dim"] * groups, config["linear_value_head_dim"]

    def tiled(rows: Tensor, size: int) -> Tensor:
        whole = rows.reshape(groups, heads // groups, size, *rows.shape[1:])
        return whole.transpose(0, 1).reshape(rows.shape)

    if ".in_proj_qkv." in name or ".conv1d." in name:
        values = values.squeeze()
        values = torch.cat((values[: 2 * keys], tiled(values[2 * keys :], width)))
    elif ".in_proj_z." in name:
        values = tiled(values, width)
    elif ".out_proj." in name:
        values = tiled(values.T, width).T
    elif name.endswith((".in_proj_a.weight", ".in_proj_b.weight", ".A_log", ".dt_bias")):
        values = tiled(values, 1)
    if name.endswith(".A_log"):
        values = -values.exp()
    elif name.endswith(".dt_bias"):
        name = name.replace(".dt_bias", ".dt_proj.bias")
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        values = values + 1
    return name, values
