"""A small Triton kernel that multiplies with tiles (native/tiles.h): GPUs can read them.

Does not know models; it is an experiment that was kept, not a tier. One program computes one row
block of 16 outputs for ROWS rows of activations; lane r is row r of the block, so a warp's loads of
codes are 16 · v neighbouring 32-bit words, and of scales 16 neighbouring halves. The arithmetic is
the canonical one of tiles.h: integer sums per group, combined in float32 in ascending order.
"""

# ruff: noqa: N803 (constants of a Triton kernel are written in capitals)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeinf.native import BLOCK_ROWS, GROUP, Q4_ZERO, Q8_ZERO, TILE_COLUMNS


@triton.jit
def _product(
    words, scales, codes, activation_scales, out,
    tiles, count,
    IS_Q4: tl.constexpr, ZERO: tl.constexpr, WORDS: tl.constexpr, TILE_WORDS: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    lane = tl.arange(0, LANES)
    token = tl.arange(0, ROWS)
    there = token < count
    total = tl.zeros((ROWS, LANES), tl.float32)
    for group in range(2 * tiles):
        tile = (block * tiles + group // 2) * TILE_WORDS
        dot = tl.zeros((ROWS, LANES), tl.int32)
        for v in tl.static_range(WORDS):
            word = tl.load(words + tile + (group % 2) * WORDS * LANES + v * LANES + lane)
            for b in tl.static_range(4):
                byte = (word >> (8 * b)) & 255
                k = token * (2 * tiles * GROUP) + group * GROUP + 4 * v + b
                first = tl.load(codes + k, there, 0).to(tl.int32)
                low = byte & 15 if IS_Q4 else byte
                dot += first[:, None] * (low - ZERO)[None, :]
                if IS_Q4:
                    second = tl.load(codes + k + GROUP // 2, there, 0).to(tl.int32)
                    dot += second[:, None] * ((byte >> 4) - ZERO)[None, :]
        place = 2 * tile + 4 * WORDS * LANES + (group % 2) * LANES
        weight = tl.load(scales + place + lane).to(tl.float32)
        x = tl.load(activation_scales + token * 2 * tiles + group, there, 0.0)
        total = tl.fma(dot.to(tl.float32), weight[None, :] * x[:, None], total)
    at = token[:, None] * (tl.num_programs(0) * LANES) + block * LANES + lane[None, :]
    tl.store(out + at, total, there[:, None])


def product(tiles: Tensor, form: str, rows: int, columns: int, x: Tensor) -> Tensor:
    """x [T, K] float32, T ≤ 16 -> x Wᵀ [T, N] float32 from the tiles of W [N, K]."""
    count, blocks = len(x), -(-rows // BLOCK_ROWS)
    across = -(-columns // TILE_COLUMNS)
    codes, sizes = quantised(x, across * TILE_COLUMNS)
    out = torch.empty(count, blocks * BLOCK_ROWS)
    words = GROUP // (8 if form == "Q4" else 4)
    _product[(blocks,)](
        tiles.view(torch.int32), tiles.view(torch.float16), codes, sizes, out,
        across, count,
        IS_Q4=form == "Q4", ZERO=Q4_ZERO if form == "Q4" else Q8_ZERO, WORDS=words,
        TILE_WORDS=2 * BLOCK_ROWS * words + BLOCK_ROWS, ROWS=16, LANES=BLOCK_ROWS, GROUP=GROUP,
    )  # fmt: skip
    return out[:, :rows]


def quantised(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The activations as activations.h has them: codes [T, width] int8, scales [T, width / 32]."""
    padded = torch.zeros(len(x), width)
    padded[:, : x.shape[1]] = x
    groups = padded.view(len(x), -1, GROUP)
    largest = groups.abs().amax(-1, keepdim=True)
    codes = torch.where(largest > 0, groups * (127.0 / largest), 0.0).round().to(torch.int8)
    return codes.view(len(x), width), (largest / 127.0).squeeze(-1).contiguous()
