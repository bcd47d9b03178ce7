"""The layout of GGUF files, read back by llama.cpp's own Python package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader

from moeinf.runtime.gguf.writing.writer import Kind, Value, WrittenTensor, fits, lay_out

KEYS: dict[str, Value] = {
    "general.architecture": "olmoe",
    "a.flag": True,
    "a.count": 4_000_000_000,
    "a.number": 0.1,
    "a.words": ["one", "zwölf", ""],
    "a.none": [],
    "a.scores": np.array([-1.5, 2.0], "<f4"),
    "a.types": np.array([1, -3], "<i4"),
}


def read(path: Path) -> tuple[dict[str, Any], GGUFReader]:
    """Return the keys and the reader of a file."""
    reader = GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    return {name: value for name, value in keys.items() if not name.startswith("GGUF.")}, reader


def test_a_file_is_read_back(tmp_path: Path) -> None:
    tensors = [
        WrittenTensor("vector", Kind.F32, (3,)),
        WrittenTensor("halves", Kind.BF16, (2, 5)),
        WrittenTensor("experts", Kind.Q4_0, (2, 3, 64)),
        WrittenTensor("last", Kind.MXFP4, (1, 32)),
    ]
    layout = lay_out(KEYS, tensors)
    data = bytearray(layout.size_bytes)
    data[: len(layout.header)] = layout.header
    draw = np.random.default_rng(0)
    bodies = {}
    for tensor in tensors:
        assert layout.offsets[tensor.name] % 32 == 0
        bodies[tensor.name] = draw.integers(256, size=tensor.size_bytes, dtype=np.uint8)
        at = layout.offsets[tensor.name]
        data[at : at + tensor.size_bytes] = bodies[tensor.name].tobytes()
    (tmp_path / "x.gguf").write_bytes(data)
    keys, reader = read(tmp_path / "x.gguf")
    assert keys.pop("a.number") == np.float32(0.1)
    wanted = {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in KEYS.items()}
    wanted.pop("a.number")
    assert keys == wanted
    for tensor, found in zip(tensors, reader.tensors, strict=True):
        assert found.name == tensor.name
        assert tuple(found.shape.tolist()) == tensor.shape[::-1]
        assert (found.tensor_type, found.n_bytes) == (tensor.kind, tensor.size_bytes)
        assert found.data.tobytes() == bodies[tensor.name].tobytes()


def test_whole_blocks() -> None:
    assert fits(Kind.Q8_0, 96)
    assert not fits(Kind.Q4_0, 48)
    assert fits(Kind.BF16, 7)
