"""Blocks of ggml from stored rows: llama.cpp's Python package reads our own values, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from moeinf.native import BLOCK_ROWS
from moeinf.offload.format.quantise import dequantise, quantise
from moeinf.offload.format.retile import retile
from moeinf.runtime.checkpoints.quantised.fused_experts import tile_blocks, widen_blocks
from moeinf.runtime.gguf.writing.blocks import encode_rows, factors_of, kind_of
from moeinf.runtime.gguf.writing.writer import Kind

SHAPES = [(16, 64), (1, 32), (17, 96), (40, 160)]  # whole tiles, and rows and columns to drop


def stored_and_values(form: str, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return tiles with random content, and the float32 matrix that they mean."""
    draw = torch.Generator().manual_seed(rows * columns)
    if form != "MXFP4":
        tiles = quantise(torch.randn(rows, columns, generator=draw), form)
        return tiles, dequantise(tiles, form, rows, columns)
    blocks = torch.randint(256, (rows, columns // 32, 16), generator=draw).byte()
    scales = torch.randint(252, (rows, columns // 32), generator=draw).byte()
    return tile_blocks(blocks, scales), widen_blocks(blocks, scales)


@pytest.mark.parametrize("form", ["Q4", "Q8", "MXFP4"])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_tiles_keep_their_values(form: str, rows: int, columns: int) -> None:
    tiles, values = stored_and_values(form, rows, columns)
    kind = kind_of(form, (rows, columns), exact=False)
    found = encode_rows(tiles.numpy(), form, rows, columns, kind)
    read = dequantize(found, GGMLQuantizationType(int(kind)))
    assert read.shape == values.shape
    assert (read + 0.0).tobytes() == (values.numpy() + 0.0).tobytes()  # -0 is 0


def test_blocks_of_nvfp4_are_those_of_the_tiles() -> None:
    """Every byte of a scale keeps its value, and factors are those of the rows."""
    blocks = torch.randint(256, (37, 3, 36), generator=torch.Generator().manual_seed(1)).byte()
    blocks[..., 0] = torch.tensor([0, 0x7E, 0x7F, 0x80, 0xFE, 0xFF] * 19)[: 37 * 3].view(37, 3)
    rows, factors = blocks.flatten(1), torch.rand(37)
    tiles = retile(rows, "NVFP4", 192, factors).numpy()
    found = encode_rows(tiles, "NVFP4", 37, 192, Kind.NVFP4)
    read, wanted = (dequantize(x, GGMLQuantizationType.NVFP4) for x in (found, rows.numpy()))
    assert read.tobytes() == wanted.tobytes()
    assert factors_of(tiles, 37, 192).tobytes() == factors.numpy().tobytes()
    assert kind_of("NVFP4", (37, 96), exact=False) == Kind.F32


@pytest.mark.parametrize("form", ["Q4", "Q8"])
def test_rows_that_are_no_whole_blocks_become_float32(form: str) -> None:
    assert kind_of(form, (20, 48), exact=False) == Kind.F32
    tiles, values = stored_and_values(form, 20, 48)
    found = encode_rows(tiles.numpy(), form, 20, 48, Kind.F32)
    assert found.shape == (20, 4 * 48)
    assert found.tobytes() == values.numpy().tobytes()


def test_blocks_of_rows_are_rows_of_the_whole() -> None:
    stored = quantise(torch.randn(40, 96), "Q4").numpy()
    whole = encode_rows(stored, "Q4", 40, 96, Kind.Q4_0)
    share = len(stored) // 3  # row blocks of 16
    first = encode_rows(stored[:share], "Q4", BLOCK_ROWS, 96, Kind.Q4_0)
    rest = encode_rows(stored[share:], "Q4", 40 - BLOCK_ROWS, 96, Kind.Q4_0)
    assert np.concatenate((first, rest)).tobytes() == whole.tobytes()


def test_vectors_and_gates_are_float32() -> None:
    assert kind_of("BF16", (64,), exact=False) == Kind.F32
    assert kind_of("BF16", (8, 64), exact=True) == Kind.F32
    assert kind_of("BF16", (8, 7), exact=False) == Kind.BF16
    values = torch.randn(3, 5).bfloat16()
    data = values.view(torch.uint8).numpy().reshape(-1)
    wide = encode_rows(data, "BF16", 3, 5, Kind.F32)
    assert wide.tobytes() == values.float().numpy().tobytes()
    assert encode_rows(data, "BF16", 3, 5, Kind.BF16).tobytes() == data.tobytes()
