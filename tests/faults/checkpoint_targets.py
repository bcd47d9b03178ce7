"""The fuzzer's targets that read headers and matrices of safetensors files."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save

from moeinf.models.base import ModelDataError
from moeinf.models.config import Fields
from moeinf.models.quantisation import refuse_quantised
from moeinf.offload.format.layout import stored_bytes
from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint, open_checkpoint, read_header
from moeinf.runtime.checkpoints.encode import encoded
from moeinf.runtime.checkpoints.quantised.joining import joined


def safetensors(data: bytes, folder: Path, name: str = "x.safetensors") -> None:
    path = folder / name
    path.write_bytes(data)
    tensors = read_header(path)
    length = struct.unpack("<Q", data[:8])[0]
    assert sum(t.size_bytes for t in tensors.values()) == len(data) - 8 - length


def header(data: bytes, folder: Path, name: str = "x.safetensors") -> None:
    """Read a header of the right length, followed by the data it declares if that is small."""
    try:
        ends = [about["data_offsets"][1] for about in json.loads(data).values()]
        room = max(ends) if all(type(end) is int for end in ends) else 0
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        room = 0
    body = bytes(room if 0 <= room <= 4096 else 0)
    safetensors(struct.pack("<Q", len(data)) + data + body, folder, name)


def packed(data: bytes, folder: Path) -> None:
    """Read the matrices of a line of quantization_config and a line of a header."""
    section, _, about = data.partition(b"\n")
    (folder / "config.json").write_bytes(b'{"quantization_config": ' + section + b"}")
    with suppress(BadCheckpoint):  # the file is written, even so
        header(about, folder, "model.safetensors")
    checkpoint = open_checkpoint(folder)
    refuse_quantised(Fields(checkpoint.config))
    for tensor in joined(checkpoint).values():
        if tensor.scales is not None:
            for form in ("Q4", "Q8", "BF16"):
                size = sum(block.nbytes for block in encoded(tensor, form))
                assert size == stored_bytes(form, tensor.shape)


def safetensors_seeds() -> list[bytes]:
    tensors = {"a": torch.ones(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
    return [save(tensors), save({"x": torch.ones(0)}), b"GGUF\x03\0\0\0" + bytes(32)]


def headers() -> list[bytes]:
    return [data[8 : 8 + struct.unpack("<Q", data[:8])[0]] for data in safetensors_seeds()[:2]]


def packed_seeds() -> list[bytes]:
    weights = {"num_bits": 4, "group_size": 32, "symmetric": False, "strategy": "group"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    one = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    codes = {"weight_packed": torch.ones(3, 8).int(), "weight_scale": torch.ones(3, 2).bfloat16()}
    codes |= {"weight_zero_point": torch.ones(1, 2).int()}
    stated = {**codes, "weight_shape": torch.ones(2).long()}
    raw, scale = torch.zeros(3, 16).byte(), torch.ones(3, 2).to(torch.float8_e4m3fn)
    four = {"weight": raw, "weight_scale": scale, "weight_scale_2": torch.ones(())}
    eight = {"weight": scale, "weight_scale": torch.ones(3, 1), "input_scale": torch.ones(())}
    sections = 2 * [{**one, "config_groups": groups}]
    sections += 2 * [{"quant_method": "modelopt", "quant_algo": "NVFP4"}]
    found = []
    for section, parts in zip(sections, (codes, stated, four, eight), strict=True):
        data = save({f"a.{name}": part for name, part in parts.items()})
        about = data[8 : 8 + struct.unpack("<Q", data[:8])[0]]
        found.append(json.dumps(section).encode() + b"\n" + about)
    return found


CHECKPOINT_TARGETS = {
    "safetensors": (safetensors, (BadCheckpoint,), safetensors_seeds),
    "header": (header, (BadCheckpoint,), headers),
    "packed": (packed, (BadCheckpoint, ModelDataError), packed_seeds),
}
