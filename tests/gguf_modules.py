"""Write modules of multi-token prediction as llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

_QWENS = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}
_ENDS = {
    "eh_proj.weight": "nextn.eh_proj.weight",
    "embed_tokens.weight": "nextn.embed_tokens.weight",
    "enorm.weight": "nextn.enorm.weight",
    "hnorm.weight": "nextn.hnorm.weight",
    "shared_head.head.weight": "nextn.shared_head_head.weight",
    "shared_head.norm.weight": "nextn.shared_head_norm.weight",
}


def module_count(stored: Mapping[str, Tensor]) -> int:
    return sum(name.endswith(("eh_proj.weight", "mtp.fc.weight")) for name in stored)


def behind(stored: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors with Qwen's module as the layer after the last one."""
    layer = f"model.layers.{config['num_hidden_layers']}."
    found = {}
    for name, values in stored.items():
        if name.startswith("mtp.layers.0."):
            name = layer + name.removeprefix("mtp.layers.0.")
        elif name.startswith("mtp."):
            part, _, end = name.removeprefix("mtp.").partition(".")
            name = f"{layer}{_QWENS[part]}.{end}"
        found[name] = values
    return found


def module_name(name: str) -> str | None:
    """Return the name of a tensor that only a module has."""
    if not name.startswith("model.layers."):
        return None
    block, _, end = name.removeprefix("model.layers.").partition(".")
    return f"blk.{block}.{_ENDS[end]}" if end in _ENDS else None
