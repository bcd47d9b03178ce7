"""Formats of GGML, compared with the package `gguf`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from moeinf.offload.format.quantise import dequantise
from moeinf.offload.format.tiling import tile
from moeinf.runtime.checkpoints.checkpoint import Recipe, SourceTensor
from moeinf.runtime.checkpoints.encode import encoded
from moeinf.runtime.checkpoints.finite import NotFiniteWeights, WeightCheck
from moeinf.runtime.checkpoints.quantised.fused_experts import nibbles, widen_blocks
from moeinf.runtime.checkpoints.quantised.ggml import TYPES, bits_of, dtype_of, keeps
from moeinf.runtime.checkpoints.quantised.ggml_rows import widen

FORMS = {"Q4_0": "Q4", "Q8_0": "Q8", "MXFP4": "MXFP4"}
QUANTISED = sorted({about.name for about in TYPES.values()} - {"F32", "F16", "BF16", "I32"})


def test_the_table_is_that_of_the_package() -> None:
    for number, about in TYPES.items():
        kind = Kind(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (
            about.name,
            (about.weights, about.size_bytes),
        )


def stored(kind: str, rows: int, columns: int, folder: Path) -> tuple[SourceTensor, Tensor]:
    """Return a tensor of random blocks in a file, and its values. Scales are moderate."""
    weights, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    draw = np.random.default_rng(7)
    if kind in FORMS:
        values = draw.standard_normal((rows, columns), np.float32)
        values[:, :32] *= draw.choice([-1.0, 1.0])
        raw = gguf.quants.quantize(values, Kind[kind])
    else:
        raw = draw.integers(0, 60, (rows, columns // weights * size), np.uint8)
    (folder / "x").write_bytes(b"12345" + raw.tobytes())
    tensor = SourceTensor("x", dtype_of(kind), (rows, columns), folder / "x", 5, raw.nbytes)
    return tensor, torch.from_numpy(gguf.quants.dequantize(raw, Kind[kind]).astype(np.float32))


def joined(tensor: SourceTensor, form: str) -> Tensor:
    data = bytearray().join(bytes(block) for block in encoded(tensor, form))
    return torch.frombuffer(data, dtype=torch.uint8)


SIZES = pytest.mark.parametrize(("rows", "columns"), [(1, 32), (16, 64), (37, 96), (4500, 288)])


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
@SIZES
def test_codes_and_scales_are_kept(kind: str, rows: int, columns: int, tmp_path: Path) -> None:
    tensor, values = stored(kind, rows, columns, tmp_path)
    form = FORMS[kind]
    assert keeps(tensor.dtype, form)
    assert torch.equal(dequantise(joined(tensor, form), form, rows, columns), values)


@SIZES
def test_mxfp4_becomes_the_tiles_of_gpt_oss(rows: int, columns: int, tmp_path: Path) -> None:
    tensor, values = stored("MXFP4", rows, columns, tmp_path)
    raw = torch.frombuffer(bytearray((tmp_path / "x").read_bytes()[5:]), dtype=torch.uint8)
    raw = raw.view(rows, -1, 17)
    halves = raw[..., 1:]
    codes = torch.cat((halves & 15, halves >> 4), -1)  # in order of columns
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    assert torch.equal(widen_blocks(blocks, raw[..., 0]), values)
    assert torch.equal(
        joined(tensor, "MXFP4"), tile(nibbles(blocks).flatten(1), raw[..., 0], "MXFP4")
    )


@pytest.mark.parametrize("kind", QUANTISED)
def test_every_type_is_widened_exactly(kind: str, tmp_path: Path) -> None:
    tensor, values = stored(kind, 19, 512, tmp_path)
    wide = joined(tensor, "F32").view(torch.float32).view(19, 512)
    assert torch.equal(wide, values)
    assert bits_of(tensor.dtype) == 8 * tensor.size_bytes / values.numel()


@pytest.mark.parametrize("form", ["Q8", "F32"])
def test_rows_in_another_order_keep_their_codes(form: str, tmp_path: Path) -> None:
    tensor, values = stored("Q8_0", 21, 96, tmp_path)
    recipe = Recipe((tensor,), lambda rows: rows.flip(0), moves_rows=True)
    turned = replace(tensor, recipe=recipe)
    raw = joined(turned, form)
    found = dequantise(raw, form, 21, 96) if form == "Q8" else raw.view(torch.float32).view(21, 96)
    assert torch.equal(found, values.flip(0))


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_an_infinite_scale_is_found(kind: str, tmp_path: Path) -> None:
    tensor, _ = stored(kind, 16, 64, tmp_path)
    raw = bytearray((tmp_path / "x").read_bytes())
    raw[5:7] = b"\0\x7c"  # float16 infinity
    (tmp_path / "x").write_bytes(raw)
    for form in (FORMS[kind], "F32"):
        with pytest.raises(NotFiniteWeights):
            list(encoded(tensor, form, WeightCheck().look))


def test_plain_types_are_widened_as_torch_does() -> None:
    rows = torch.randn(3, 8)
    for dtype, name in ((torch.bfloat16, "BF16"), (torch.float16, "F16")):
        assert torch.equal(widen(rows.to(dtype).view(torch.uint8), name), rows.to(dtype).float())
