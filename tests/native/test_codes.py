"""Test that kernels take every code that a checkpoint may have, on every path."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moeinf.native import _native, matrix_bytes
from moeinf.offload.format.quantise import dequantise
from moeinf.offload.format.tiling import tile
from tests.native.test_kernels import PATHS, aligned, linear, use


@pytest.fixture(autouse=True)
def fastest_path() -> Iterator[None]:
    yield
    assert _native._use_kernels("")


@pytest.mark.parametrize(("form", "codes"), [("Q8", 256), ("Q4", 16)])
def test_every_code_is_exact_on_every_path(form: str, codes: int) -> None:
    """quantise_rows writes no code 0 in q8; packed integers of a checkpoint have it."""
    draw = torch.Generator().manual_seed(6)
    every = torch.randint(codes, (21, 96), generator=draw).to(torch.uint8)
    every[3] = 0
    scales = (2.0 ** torch.randint(-1, 2, (21, 3), generator=draw)).half()  # all sums are exact
    tiles = tile(every, scales, form)
    data = aligned(matrix_bytes(form.lower(), 21, 96)).copy_(tiles)
    values = (every.float() - codes // 2) * scales.float().repeat_interleave(32, 1)
    assert torch.equal(dequantise(data, form, 21, 96), values)
    x = torch.randint(-127, 128, (5, 96), generator=draw).float()
    x[:, ::32] = 127  # the largest of each group: x is not rounded
    for path in [path for path in PATHS if use(path)]:
        out = linear(form.lower(), data, (21, 96), x)
        assert torch.equal(out, x @ values.T), path


@pytest.mark.parametrize(("form", "bits"), [("Q3", 3), ("Q2", 2)])
def test_odd_weights_are_drawn_as_in_tiles_h_and_exact_on_every_path(form: str, bits: int) -> None:
    draw = torch.Generator().manual_seed(7)
    tiles, group, tile_bytes = 2 * 2, 64 * bits, 64 * bits * 2 + 64
    data = aligned(matrix_bytes(form.lower(), 19, 96))
    assert len(data) == tiles * tile_bytes
    data.copy_(torch.randint(256, (len(data),), generator=draw).to(torch.uint8))
    codes = data.view(tiles, tile_bytes)[:, : 2 * group]
    scales = (2.0 ** torch.randint(-1, 2, (tiles, 32), generator=draw)).half()
    data.view(tiles, tile_bytes)[:, 2 * group :] = scales.view(torch.uint8)
    values = torch.empty(19, 96)
    for row in range(19):
        for k in range(96):
            at, half, v, b = row // 16 * 2 + k // 64, k % 64 // 32, k % 32 // 4, k % 4
            words = codes[at, group * half + 4 * (row % 16) + b :]
            code = int(words[v % 2 * 64]) >> (v // 2 * 2) & 3
            if bits == 3:
                code |= (int(words[128]) >> v & 1) << 2
            values[row, k] = (2 * code + 1 - 2**bits) * scales[at, 16 * half + row % 16]
    assert torch.equal(dequantise(data, form, 19, 96), values)
    x = torch.randint(-127, 128, (5, 96), generator=draw).float()
    x[:, ::32] = 127
    for path in [path for path in PATHS if use(path)]:
        out = linear(form.lower(), data, (19, 96), x)
        assert torch.equal(out, x @ values.T), path
