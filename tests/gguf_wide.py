"""Widen a GGUF file with the package gguf."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from moeinf.runtime.gguf.writing.writer import Kind, Value, WrittenTensor, lay_out


def widened(file: Path) -> Path:
    """Return a copy of a file with every tensor in float32, for a result without rounding.

    A matrix is multiplied by its factor.
    """
    reader, keys = gguf.GGUFReader(file), dict[str, Value]()
    for name, field in reader.fields.items():
        value = field.contents()
        if isinstance(value, list) and value and not isinstance(value[0], str):
            value = np.array(value, "<f4" if isinstance(value[0], float) else "<i4")
        if not name.startswith("GGUF."):
            keys[name] = value
    factors = {t.name: t.data for t in reader.tensors if t.name.endswith("scale")}
    matrices = [tensor for tensor in reader.tensors if tensor.name not in factors]
    tensors = [
        WrittenTensor(tensor.name, Kind.F32, tuple(map(int, tensor.shape[::-1])))
        for tensor in matrices
    ]
    layout = lay_out(keys | {"general.file_type": 0}, tensors)
    made = file.with_suffix(".wide.gguf")
    with made.open("wb") as out:
        out.write(layout.header)
        for tensor in matrices:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            factor = factors.get(f"{tensor.name.removesuffix('weight')}scale", np.ones(1, "<f4"))
            if tensor.tensor_type == Type.NVFP4:
                values = values * factor.reshape(-1, *[1] * (values.ndim - 1))
            out.seek(layout.offsets[tensor.name])
            out.write(values.astype("<f4").tobytes())
        out.truncate(layout.size_bytes)
    return made
