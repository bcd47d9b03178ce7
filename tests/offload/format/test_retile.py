"""Tiles of GGUF's blocks: the values of the package gguf, bit for bit."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from moeinf.native import dequantise_rows, gather_rows, matrix_bytes, quantise_rows, tile_columns
from moeinf.offload.format.quantise import dequantise
from moeinf.offload.format.retile import BLOCK_BYTES, nvfp4_blocks, retile
from tests.gguf_blocks import tiled

KINDS = {"Q4K": Kind.Q4_K, "Q5K": Kind.Q5_K, "Q6K": Kind.Q6_K, "NVFP4": Kind.NVFP4}
HALVES = {"Q4K": (0, 2), "Q5K": (0, 2), "Q6K": (208,), "NVFP4": ()}  # where a block has float16
FORMS = list(KINDS)


def random_blocks(form, rows, blocks, seed=1):
    """Return random bytes [rows, blocks · bytes of a block] with finite float16 numbers."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(256, (rows, blocks, BLOCK_BYTES[form]), generator=generator)
    for at in HALVES[form]:
        found[..., at + 1] &= 0xBB  # no exponent of 31
    return found.to(torch.uint8).flatten(1)


def by_gguf(blocks, form, columns):
    with np.errstate(all="ignore"):
        values = dequantize(blocks.numpy().reshape(-1, BLOCK_BYTES[form]), KINDS[form])
    return torch.from_numpy(values.reshape(len(blocks), -1)[:, :columns].copy())


def assert_same_bits(found, wanted):
    number = ~wanted.isnan()
    assert torch.equal(found.isnan(), ~number)
    assert torch.equal(found[number].view(torch.int32), wanted[number].view(torch.int32))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (16, 3), (37, 2), (130, 5)])
def test_tiles_have_the_values_and_the_bytes_of_their_blocks(form, rows, blocks):
    columns = blocks * tile_columns(form.lower())
    source = random_blocks(form, rows, blocks)
    tiles = retile(source, form, columns)
    assert_same_bits(dequantise(tiles, form, rows, columns), by_gguf(source, form, columns))
    stored = -(-rows // 16) * 16 * (source.shape[1] + (4 if form == "NVFP4" else 0))
    assert len(tiles) == matrix_bytes(form.lower(), rows, columns) == stored


@pytest.mark.parametrize("form", ["Q4K", "Q5K", "Q6K"])
@pytest.mark.parametrize(
    "half", [0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E01, 0x0400]
)
def test_extreme_numbers_of_a_block_have_the_values_of_gguf(form, half):
    """Zeros, subnormals, the largest, infinities and NaN, times codes and scales of all ones."""
    source = random_blocks(form, 18, 2).view(18, 2, -1)
    source[::2] = 0xFF
    for at in HALVES[form]:
        source[..., at], source[..., at + 1] = half & 255, half >> 8
    source = source.flatten(1)
    found = dequantise(retile(source, form, 512), form, 18, 512)
    assert_same_bits(found, by_gguf(source, form, 512))


def test_every_scale_and_code_of_nvfp4_has_the_value_of_gguf():
    source = random_blocks("NVFP4", 256, 2).view(256, 2, 36)
    source[:, :, :4] = torch.arange(256)[:, None, None]
    found = dequantise(retile(source.flatten(1), "NVFP4", 128), "NVFP4", 256, 128)
    assert_same_bits(found, by_gguf(source.flatten(1), "NVFP4", 128))


def test_nvfp4_of_a_checkpoint_has_the_values_that_its_parts_name():
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(256, (21, 88), generator=generator).to(torch.uint8)  # 176 columns
    scales = torch.randint(0x7F, (21, 11), generator=generator).to(torch.uint8)
    factors = torch.rand(21, generator=generator) / 100
    blocks = nvfp4_blocks(codes, scales.view(torch.float8_e4m3fn))
    found = dequantise(retile(blocks, "NVFP4", 176, factors), "NVFP4", 21, 176)
    sizes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    e2m1 = torch.tensor(sizes + [-size for size in sizes])
    numbers = e2m1[torch.stack((codes & 15, codes >> 4), 2).flatten(1).long()]
    e4m3 = scales.view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)
    assert torch.equal(found, numbers * e4m3 * factors[:, None])


@pytest.mark.parametrize("form", FORMS)
def test_a_gathered_row_is_the_row_of_the_matrix(form):
    columns = 2 * tile_columns(form.lower())
    source = random_blocks(form, 40, 2)
    tiles, ids = retile(source, form, columns), torch.tensor([39, 0, 17, 17])
    rows = torch.empty(4, columns)
    gather_rows(
        tiles.data_ptr(), form.lower(), 40, columns, ids.data_ptr(), 4, rows.data_ptr(), True
    )
    assert torch.equal(rows, by_gguf(source, form, columns)[ids])


@pytest.mark.parametrize("form", FORMS)
def test_columns_that_fill_no_tile_are_padded(form):
    weights = torch.randn(19, 300, generator=torch.Generator().manual_seed(3))
    values = dequantise(tiled(weights, form.lower()), form, 19, 300)
    error = float((values - weights).norm() / weights.norm())
    assert error < {"Q4K": 0.09, "Q5K": 0.05, "Q6K": 0.03, "NVFP4": 0.12}[form]


def test_other_shapes_and_formats_are_refused():
    blocks = random_blocks("Q4K", 4, 2)
    for wrong in (blocks[:, 1:], blocks.int(), blocks[0]):
        with pytest.raises(ValueError, match="expected"):
            retile(wrong, "Q4K", 512)
    with pytest.raises(ValueError, match="factors are for NVFP4 only"):
        retile(blocks, "Q4K", 512, torch.ones(4))
    codes, scales = torch.zeros(2, 32).to(torch.uint8), torch.zeros(2, 4).to(torch.uint8)
    for bad in (0x7F, 0x80, 0xFF):
        scales[1, 2] = bad
        with pytest.raises(ValueError, match="negative or NaN"):
            nvfp4_blocks(codes, scales)
    with pytest.raises(ValueError, match="codes are"):
        nvfp4_blocks(codes, scales[:, :3])
    with pytest.raises(ValueError, match="not quantised"):
        quantise_rows(0, 1, 1, True, "nvfp4", 0)
    with pytest.raises(ValueError, match="no tiles"):
        dequantise_rows(0, "bf16", 1, 1, 0)
