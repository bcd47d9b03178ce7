"""Write tiny checkpoints with layers for multi-token prediction, which transformers drops."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from scripts.make_checkpoint import byte_tokenizer
from tests.tiny import save_tiny
from tests.tiny_families import Tiny, mimo

MIMO = mimo(layer_types=["sliding_attention", "full_attention", "sliding_attention"])
_IN_MIMO = {"post_attention_layernorm": "pre_mlp_layernorm", "sinks": "attention_sink_bias"}


def tiny_of(name: str) -> str | Tiny:
    """Return what to make of a name: MiMo's needs a dense layer with a window."""
    return MIMO if name == "mimo" else name


def checkpoint(name: str, folder: Path) -> int:
    """Write a tiny checkpoint whose module is a copy of a layer; return that layer's number.

    The layer has experts, and full attention. MiMo's has a dense network and a window.
    """
    model = save_tiny(tiny_of(name), folder, seed=4)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config, (path,) = model.config, folder.glob("*.safetensors")
    tensors = load_file(path)
    if name.startswith("qwen"):
        layer = config.layer_types.index("full_attention")
        block, stem = "mtp.layers.0.", "mtp."
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    elif name == "mimo":
        layer, block, stem = 0, "model.mtp.layers.0.", "model.mtp.layers.0."
        names = ("enorm", "hnorm", "eh_proj", "final_layernorm")
    else:
        layer = config.num_hidden_layers - 1
        block = stem = f"model.layers.{config.num_hidden_layers}."
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        tensors[f"{stem}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{stem}shared_head.head.weight"] = tensors["model.embed_tokens.weight"].clone()
    theirs = f"model.layers.{layer}."
    copies = {n: t.clone() for n, t in tensors.items() if n.startswith(theirs)}
    if name == "mimo":
        for ours, published in _IN_MIMO.items():
            copies = {n.replace(ours, published): t for n, t in copies.items()}
    tensors |= {block + n.removeprefix(theirs): t for n, t in copies.items()}
    draw, wide = torch.Generator().manual_seed(1), config.hidden_size
    for n in names:
        shape = (wide, 2 * wide) if n in ("fc", "eh_proj") else (wide,)
        tensors[f"{stem}{n}.weight"] = torch.randn(shape, generator=draw)
    save_file(tensors, path, metadata={"format": "pt"})
    return layer


def add_second(folder: Path) -> None:
    """Add twice the module, which is behind the last layer, to a checkpoint as the second one."""
    (path,), about = folder.glob("*.safetensors"), folder / "config.json"
    tensors, config = load_file(path), json.loads(about.read_text())
    first, second = (f"model.layers.{config['num_hidden_layers'] + n}." for n in range(2))
    more = {n.replace(first, second): 2 * t for n, t in tensors.items() if n.startswith(first)}
    save_file(tensors | more, path, metadata={"format": "pt"})
    about.write_text(json.dumps({**config, "num_nextn_predict_layers": 2}))
