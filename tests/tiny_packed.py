"""Build tiny checkpoints whose matrices are packed integers, NVFP4 or 8-bit floats with scales.

The codes are drawn and packed here number by number, without the project's code.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.make_checkpoint import byte_tokenizer
from tests.tiny import TINY, save_tiny
from tests.tiny_families import YARN, deepseek_v3, glm4, qwen3, qwen35

Packed = tuple[dict[str, Tensor], Tensor]  # tensors by the end of their name, what they mean
Packer = Callable[[int, int, torch.Generator], Packed]  # rows, columns
NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
WIDE = {  # every side is a multiple of 32, moe_intermediate_size of half a tile
    "deepseek_v3": deepseek_v3(
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.827,
        rope_parameters={**YARN, "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "glm4_moe": glm4(hidden_size=64, moe_intermediate_size=32, head_dim=16, intermediate_size=96),
    "qwen3_5_moe": qwen35(hidden_size=64, moe_intermediate_size=32),
    "qwen3_moe": qwen3(hidden_size=64, moe_intermediate_size=64, head_dim=16, vocab_size=256),
}


def integers(bits: int = 4, group: int = 32, symmetric: bool = True) -> Packer:
    """Return a packer of integers; group 0: one scale per row."""

    def pack(rows: int, columns: int, draw: torch.Generator) -> Packed:
        groups = columns // group if group else 1
        codes = torch.randint(1 << bits, (rows, columns), generator=draw)
        scales = _scales(rows, groups, columns * 4**bits / 12, draw).bfloat16()
        zeros = torch.full((rows, groups), 1 << (bits - 1))
        if not symmetric:
            zeros = torch.randint(1 << bits, (rows, groups), generator=draw)
        per = columns // groups
        meaning = torch.zeros(rows, columns)
        for c in range(columns):
            away = codes[:, c] - zeros[:, c // per]
            meaning[:, c] = away.float() * scales[:, c // per].float()
        stored = {
            "_packed": words(codes.tolist(), bits),
            "_scale": scales,
            "_shape": torch.tensor([rows, columns]),
        }
        if not symmetric:
            stored["_zero_point"] = words(zeros.T.tolist(), bits).T.contiguous()
        return stored, meaning

    return pack


def words(rows: Sequence[Sequence[int]], bits: int) -> Tensor:
    """Pack each row's codes into 32-bit words, the first code in the lowest bits."""
    per, found = 32 // bits, []
    for row in rows:
        line = []
        for first in range(0, len(row), per):
            word = sum(code << (bits * n) for n, code in enumerate(row[first : first + per]))
            line.append(word - (1 << 32) if word >> 31 else word)
        found.append(line)
    return torch.tensor(found, dtype=torch.int32)


def nvfp4(divides: bool) -> Packer:
    """Return a packer of NVFP4: as compressed-tensors if it divides, else as ModelOpt."""

    def pack(rows: int, columns: int, draw: torch.Generator) -> Packed:
        codes = torch.randint(16, (rows, columns), generator=draw)
        scales = (100 * torch.rand(rows, columns // 16, generator=draw)).to(torch.float8_e4m3fn)
        factor = torch.tensor(1 / (180 * columns**0.5))
        if divides:
            factor = (1 / factor).view(1)
        numbers = torch.tensor([
            [NUMBERS[code & 7] * (-1) ** (code >> 3) for code in row] for row in codes.tolist()
        ])  # fmt: skip
        scaled = torch.stack(
            [numbers[:, c] * scales[:, c // 16].float() for c in range(columns)], 1
        )
        raw = torch.tensor([
            [row[c] + 16 * row[c + 1] for c in range(0, columns, 2)] for row in codes.tolist()
        ], dtype=torch.uint8)  # fmt: skip
        if divides:
            return {"_packed": raw, "_scale": scales, "_global_scale": factor}, scaled / factor
        return {"": raw, "_scale": scales, "_scale_2": factor}, scaled * factor

    return pack


def floats(shape: Callable[[int, int], tuple[int, ...]], block: int = 0) -> Packer:
    """Return a packer of 8-bit floats with scales of this shape; block: the side of a block."""

    def pack(rows: int, columns: int, draw: torch.Generator) -> Packed:
        raw = torch.randn(rows, columns, generator=draw).to(torch.float8_e4m3fn)
        scales = _scales(1, 1, columns, draw) * (
            1 + torch.rand(shape(rows, columns), generator=draw)
        )
        high, wide = (block, block) if block else (1, columns)
        factors = scales.view(rows if scales.numel() == rows else -1, 1) if not block else scales
        meaning = torch.zeros(rows, columns)
        for r in range(rows):
            for c in range(columns):
                meaning[r, c] = raw[r, c].float() * factors[(r // high) % len(factors), c // wide]
        return {"": raw, "_scale": scales.view(shape(rows, columns))}, meaning

    return pack


def _scales(rows: int, columns: int, variance: float, draw: torch.Generator) -> Tensor:
    """Return positive factors [rows, columns] for weights of a useful size."""
    return (0.5 + torch.rand(rows, columns, generator=draw)) / variance**0.5


def compressed(*weights: dict[str, Any], form: str = "pack-quantized") -> dict[str, Any]:
    """Return a quantization_config of compressed-tensors with one group per argument."""
    groups = {f"group_{n}": {"targets": ["Linear"], "weights": w} for n, w in enumerate(weights)}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": groups,
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def scheme(bits: int = 4, group: int = 32, symmetric: bool = True) -> dict[str, Any]:
    """Return the weights of a group whose codes `integers` packs."""
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group else "channel",
        "group_size": group or None,
        "actorder": None,
    }


def save_packed(
    folder: Path,
    quantised: dict[str, Any],
    choose: Callable[[str], Packer | None],
    family: str = "deepseek_v3",
) -> dict[str, Tensor]:
    """Write a checkpoint to `folder`, and the same with wide weights to `folder`-wide.

    choose: the packer of a matrix X.weight by its name, or None for a plain one. Returns what the
    packed matrices mean.
    """
    wide_folder = folder.with_name(f"{folder.name}-wide")
    with patch.dict(TINY, WIDE):
        save_tiny(family, wide_folder, seed=5)
    byte_tokenizer().save(str(wide_folder / "tokenizer.json"))
    shutil.copytree(wide_folder, folder)
    stored, meaning = unfused(load_file(folder / "model.safetensors")), {}
    wide, draw = dict(stored), torch.Generator().manual_seed(4)
    for name, tensor in wide.items():
        pack = choose(name) if name.endswith("_proj.weight") else None
        if pack is None:
            continue
        del stored[name]
        parts, meaning[name] = pack(*tensor.shape, draw)
        stored |= {name + end: part for end, part in parts.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    save_file(wide | meaning, wide_folder / "model.safetensors", {"format": "pt"})
    change_config(folder, quantization_config=quantised)
    return meaning


def unfused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Store each expert's matrices on their own, as ModelOpt does."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, fused, role = name.rpartition(".experts.")
        if not fused or tensor.dim() != 3:
            found[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            parts = {role: matrix}
            if role == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            for part, weight in parts.items():
                found[f"{prefix}.experts.{expert}.{part}.weight"] = weight.contiguous()
    return found


def change_config(folder: Path, **changes: Any) -> None:
    """Set keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
