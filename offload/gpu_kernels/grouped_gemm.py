"""Triton kernels for many rows: experts and dense layers on tensor cores, same bits as tiles.py.

expert_ffn.py and linear.py launch these.

The sum of a group of 32 is one step of an int8 product on tensor cores, K = 32. It is an exact
integer like that of `dp4a`. Then the scales and one fused step per group follow, in the order of
the groups. So a row's bits are those of tiles.py and of the CPU, in any block.

A tile's word is what a thread holds of such a product's operand (four k of one row of weights). So
codes are prepared as words and never shuffled. Tensor cores take signed bytes:

    q8      code - 128                                flips a bit
    q4      16 · (code - 8)                           a nibble moved up; the sum is divided by 16
    mxfp4   twice the number, which is whole          as in `dp4a`'s form, without the 12
    q3, q2  2 · code - 7 or 3                         the odd number

So no zero needs to be subtracted, and `starts` is not read. Float32 bounds these kernels: three
operations per group, row and output. To save a conversion, integer sums begin at the bits of
1.5 · 2^23, whose last 22 bits count (|sum| ≤ 2^19).

An expert's program takes one block of up to ROWS pairs that share the expert. The weights are read
once per block, by neighbouring programs: the blocks of an expert are adjacent.
"""

# ruff: noqa: N803, N806 (constants of a Triton kernel are written in capitals)
from __future__ import annotations

import triton
import triton.language as tl

from moeinf.offload.gpu_kernels.interleaved import block_products, is_interleaved
from moeinf.offload.gpu_kernels.tiles import (
    FLIP,
    activated,
    block_words,
    doubled_numbers,
    group_words,
    is_odd,
    is_ungated,
    odd_codes,
    quantised,
    scales_of,
    signed_bytes,
    stored,
    tile_words,
)

UPPER = tl.constexpr(-0x0F0F0F10)  # the upper nibble of each


@triton.jit
def product_sums(
    words, block_at, there, tiles, x_codes, x_scales, x_row,
    FORM: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the sums of `any_sums`, [R, L] float32, by tensor cores; x_codes are bytes.

    Loads are not masked. Lanes that are not `there` read the first row block, and x_row [R] must
    name existing rows.
    """
    if is_interleaved(FORM):
        return block_products(
            words, block_at, there, tiles, x_codes, x_scales, x_row, FORM, ROWS, LANES, STAGES
        )
    TILE: tl.constexpr = tile_words(FORM)
    UNIT: tl.constexpr = 0.0625 if FORM == "q4" else 1.0
    ODD_ZERO: tl.constexpr = 0x07070707 if FORM == "q3" else 0x03030303
    lane, k = tl.arange(0, LANES), tl.arange(0, 32)
    word = tl.arange(0, 4)[None, :]
    pair = word // 2
    block_at = tl.where(there, block_at, 0)
    row_at = block_at[:, None] + (lane % 16)[:, None]
    word_at = row_at + (word % 2 if is_odd(FORM) else word) * 16
    x_group = x_row.to(tl.int64) * (2 * tiles)
    total = tl.zeros((ROWS, LANES), tl.float32)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        for half in tl.static_range(2):
            group = words + tile * TILE + half * group_words(FORM)
            at = group + word_at
            low = tl.load(at)
            if FORM == "q8":
                low, high = low ^ FLIP, tl.load(at + 64) ^ FLIP
            elif FORM == "q4":
                low, high = ((low << 4) & UPPER) ^ FLIP, (low & UPPER) ^ FLIP
            elif is_odd(FORM):
                upper = tl.load(group + 32 + row_at) if FORM == "q3" else low
                high = odd_codes(low, upper, 2 + pair, 4 + word, FORM)
                low = odd_codes(low, upper, pair, word, FORM)
                low = ((low ^ FLIP) - ODD_ZERO) ^ FLIP  # 128 + code - 7 has no carries
                high = ((high ^ FLIP) - ODD_ZERO) ^ FLIP
            else:
                low, high = doubled_numbers(low)
            x_at = x_group + tile * 2 + half
            codes = tl.load(x_codes + x_at[:, None] * 32 + k[None, :])
            sums = tl.dot(
                codes, signed_bytes(low, high, LANES),
                tl.full((ROWS, LANES), 0x4B400000, tl.int32), out_dtype=tl.int32,
            )  # fmt: skip
            exact = tl.fma(sums.to(tl.float32, bitcast=True), UNIT, -12582912.0 * UNIT)
            sizes = scales_of(words, tile * TILE + block_at, lane % 16, half, True, FORM)
            x_sizes = tl.load(x_scales + x_at)
            total = tl.fma(exact, sizes[None, :] * x_sizes[:, None], total)
    return tl.where(there[None, :], total, 0.0)


@triton.jit
def block_rows(slots, order, begin, slot, pairs, ROWS: tl.constexpr):
    """Return the pairs [R] of the block at `begin` in the sorted order (or 0), and their mask."""
    at = begin + tl.arange(0, ROWS)
    there = tl.load(slots + at, at < pairs, -1) == slot
    return tl.load(order + at, there, 0).to(tl.int32), there


@triton.jit(do_not_specialize=["pairs"])
def grouped_inner(
    begins, slots, order, words, plain, slot_words, matrix_words, bias_at,
    hidden, inner, hidden_tiles, inner_groups, top_k, pairs,
    x_codes, x_scales, codes, sizes,
    FORM: tl.constexpr, DOWN: tl.constexpr, ACTIVATION: tl.constexpr, BIASED: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute activation(gate · x, up · x) of 64 columns of F: two groups of the pairs' rows.

    They are quantised for DOWN, the format of `down`.
    """
    begin = tl.load(begins + tl.program_id(1))
    if begin == pairs:
        return
    slot = tl.load(slots + begin)
    pair, there = block_rows(slots, order, begin, slot, pairs, ROWS)
    arena = slot.to(tl.int64) * slot_words
    LANES: tl.constexpr = 64 if is_ungated(ACTIVATION) else 128  # gate's rows, then up's
    tile, lane = tl.program_id(0), tl.arange(0, LANES)
    matrix, block = lane // 64, tile * 4 + lane // 16 - lane // 64 * 4
    found = product_sums(
        words + arena, matrix * matrix_words + block * block_words(hidden_tiles, FORM),
        block * 16 < inner, hidden_tiles, x_codes, x_scales, pair // top_k,
        FORM, ROWS, LANES, STAGES,
    )  # fmt: skip
    if BIASED:
        row = block * 16 + lane % 16
        bias = tl.load(plain + arena * 2 + bias_at + matrix * inner + row, row < inner, 0.0)
        found += bias.to(tl.float32)[None, :]
    if is_ungated(ACTIVATION):
        values = activated(found, found, ACTIVATION)
    else:
        gate, up = tl.split(tl.permute(tl.reshape(found, (ROWS, 2, 64)), (0, 2, 1)))
        values = activated(gate, up, ACTIVATION)
    found_codes, _, size = quantised(tl.reshape(values, (ROWS * 2, 32)), DOWN)
    half, k = tl.arange(0, 2), tl.arange(0, 64)
    group = pair.to(tl.int64) * inner_groups + tile * 2  # [R]
    found_codes = tl.reshape(found_codes, (ROWS, 64)).to(tl.int8)
    tl.store(codes + group[:, None] * 32 + k[None, :], found_codes, there[:, None])
    tl.store(sizes + group[:, None] + half[None, :], tl.reshape(size, (ROWS, 2)), there[:, None])


@triton.jit(do_not_specialize=["pairs"])
def grouped_down(
    begins, slots, order, words, plain, slot_words, down_words, bias_at,
    hidden, inner_tiles, pairs, x_codes, x_scales, out,
    FORM: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute LANES outputs of down · (output of grouped_inner), into the rows of the pairs."""
    begin = tl.load(begins + tl.program_id(1))
    if begin == pairs:
        return
    slot = tl.load(slots + begin)
    pair, there = block_rows(slots, order, begin, slot, pairs, ROWS)
    arena = slot.to(tl.int64) * slot_words
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    found = product_sums(
        words + arena + down_words, row // 16 * block_words(inner_tiles, FORM),
        row // 16 * 16 < hidden, inner_tiles, x_codes, x_scales, pair,
        FORM, ROWS, LANES, STAGES,
    )  # fmt: skip
    if BIASED:
        bias = tl.load(plain + arena * 2 + bias_at + row, row < hidden, 0.0)
        found += bias.to(tl.float32)[None, :]
    at = pair[:, None].to(tl.int64) * hidden + row[None, :]
    inside = there[:, None] & (row[None, :] < hidden)
    tl.store(out + at, stored(found, out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["count"])
def linear_many(
    words, x_codes, x_scales, out, count, outputs, tiles,
    FORM: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute LANES outputs of a dense matrix in tiles for ROWS rows of activations."""
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    x_row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    found = product_sums(
        words, row.to(tl.int64) // 16 * block_words(tiles, FORM), row // 16 * 16 < outputs, tiles,
        x_codes, x_scales, tl.where(x_row < count, x_row, 0), FORM, ROWS, LANES, STAGES,
    )  # fmt: skip
    at = x_row[:, None].to(tl.int64) * outputs + row[None, :]
    inside = (x_row[:, None] < count) & (row[None, :] < outputs)
    tl.store(out + at, stored(found, out.dtype.element_ty), inside)
