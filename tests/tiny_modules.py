"""Write tiny checkpoints with layers for multi-token prediction, which transformers drops."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from scripts.make_checkpoint import byte_tokenizer
from tests.tiny import save_tiny


def checkpoint(name: str, folder: Path) -> int:
    """Write a tiny checkpoint whose module is a copy of a layer; return that layer's number.

    The layer has experts, and full attention.
    """
    model = save_tiny(name, folder, seed=4)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config, (path,) = model.config, folder.glob("*.safetensors")
    tensors = load_file(path)
    if name.startswith("qwen"):
        layer = config.layer_types.index("full_attention")
        block, stem = "mtp.layers.0.", "mtp."
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    else:
        layer = config.num_hidden_layers - 1
        block = stem = f"model.layers.{config.num_hidden_layers}."
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        tensors[f"{stem}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{stem}shared_head.head.weight"] = tensors["model.embed_tokens.weight"].clone()
    theirs = f"model.layers.{layer}."
    copies = {n: t.clone() for n, t in tensors.items() if n.startswith(theirs)}
    tensors |= {block + n.removeprefix(theirs): t for n, t in copies.items()}
    draw, wide = torch.Generator().manual_seed(1), config.hidden_size
    for n in names:
        shape = (wide, 2 * wide) if n in ("fc", "eh_proj") else (wide,)
        tensors[f"{stem}{n}.weight"] = torch.randn(shape, generator=draw)
    save_file(tensors, path, metadata={"format": "pt"})
    return layer
