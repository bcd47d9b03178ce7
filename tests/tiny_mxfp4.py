"""Build a tiny gpt-oss with MXFP4 experts: blocks of known codes, widened in plain loops.

transformers cannot save MXFP4; it gets the widened weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny import tiny_reference
from tests.tiny_families import Tiny

D, F, E = 64, 32, 6  # of TINY["gpt-oss-blocks"]
NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def widened(blocks: Tensor, scales: Tensor) -> Tensor:
    """Widen blocks [R, G, 16] with scales [R, G] to [R, 32 G], number by number."""
    rows = []
    for row, powers in zip(blocks.tolist(), scales.tolist(), strict=True):
        values = []
        for group, power in zip(row, powers, strict=True):
            for byte in group:
                for code in (byte & 15, byte >> 4):
                    values.append(NUMBERS[code & 7] * (-1) ** (code >> 3) * 2.0 ** (power - 127))
        rows.append(values)
    return torch.tensor(rows)


def save_mxfp4(folder: Path, tiny: str | Tiny = "gpt-oss-blocks") -> Any:
    """Write config.json and safetensors with blocks; return the model of transformers."""
    model = tiny_reference(tiny, seed=3)
    sizes = model.config
    d, f, experts = sizes.hidden_size, sizes.intermediate_size, sizes.num_local_experts
    draw = torch.Generator().manual_seed(1)
    stored = {}
    for number, layer in enumerate(model.model.layers):
        for name, outs, ins in (("gate_up_proj", 2 * f, d), ("down_proj", d, f)):
            blocks = torch.randint(256, (experts, outs, ins // 32, 16), generator=draw).byte()
            scales = torch.randint(122, 126, (experts, outs, ins // 32), generator=draw).byte()
            wide = torch.stack([widened(b, s) for b, s in zip(blocks, scales, strict=True)])
            getattr(layer.mlp.experts, name).data = wide.mT.contiguous()
            prefix = f"model.layers.{number}.mlp.experts.{name}"
            stored[f"{prefix}_blocks"], stored[f"{prefix}_scales"] = blocks, scales
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in stored:
        tensors.pop(name.removesuffix("_blocks"), None)
    save_file(tensors | stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return model
