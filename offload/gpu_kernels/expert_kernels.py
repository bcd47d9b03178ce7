"""Triton kernels: quantise rows, compute experts from a slot table, dense layers, sums over K.

expert_ffn.py and linear.py launch these. They are imported only where there is a GPU.

One program of an expert's kernels computes 32 outputs for one (token, expert) pair. A pair whose
expert is not in the table ends at once. Neighbouring programs are pairs, so pairs with the same
expert share its weights in the L2 cache. There is no atomic operation, and each pair has its own
row of the output. So results do not depend on the other pairs of a launch.

Enough loads are in flight to keep memory busy. A decoded token of 8 experts with F = 768 and
D = 2048 is 192 programs of 4 warps for gate and up, and 512 for down. Each has the loads of up to 4
turns of its loop in flight, 4 and 2 KiB of q4 a turn. The reduction is not split over programs:
that needs atomics or a third launch, and its last sums form a chain anyway.
"""

# ruff: noqa: N803, N806 (constants of a Triton kernel are written in capitals)
from __future__ import annotations

import triton
import triton.language as tl

from moeinf.offload.gpu_kernels.interleaved import any_sums, gathered, is_interleaved
from moeinf.offload.gpu_kernels.tiles import (
    activated,
    block_words,
    group_words,
    is_odd,
    is_ungated,
    odd_codes,
    plain_sums,
    quantised,
    scales_of,
    stored,
    tile_words,
)


@triton.jit
def quantise_rows(
    x, codes, starts, scales, columns, groups, FORM: tl.constexpr, GROUPS: tl.constexpr
):
    """Quantise rows [T, columns] to codes [T, groups, 32] int8, starts and scales [T, groups]."""
    row = tl.program_id(0)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    k = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    values = tl.load(x + row * columns + k, k < columns, 0.0).to(tl.float32)
    found, start, scale = quantised(values, FORM)
    inside = group < groups
    tl.store(codes + row * groups * 32 + k, found.to(tl.int8), inside[:, None])
    tl.store(starts + row * groups + group, start, inside)
    tl.store(scales + row * groups + group, scale, inside)


@triton.jit
def slot_of(ids, table, first_cell, pair):
    """Return the slot of a pair's expert, int64; -1: no expert, or it is not on the device."""
    expert = tl.load(ids + pair)
    return tl.load(table + first_cell + expert, expert >= 0, -1).to(tl.int64)


@triton.jit(do_not_specialize=["first_cell"])
def expert_inner(
    ids, table, first_cell, words, plain, slot_words, matrix_words, bias_at,
    hidden, inner, hidden_tiles, inner_groups, top_k,
    x_words, x_starts, x_scales, codes, starts, sizes,
    FORM: tl.constexpr, DOWN: tl.constexpr, ACTIVATION: tl.constexpr, BIASED: tl.constexpr,
    STAGES: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """Compute activation(gate · x, up · x) of 32 columns of F: one group of the input of `down`.

    DOWN is the format of `down`, for which the group is quantised. words and plain are the same
    arena, as int32 and as bf16. x is quantised. For bf16, x_words are the rows themselves and codes
    receives bf16 values.
    """
    pair, group = tl.program_id(0), tl.program_id(1)
    slot = slot_of(ids, table, first_cell, pair)
    if slot < 0:
        return
    LANES: tl.constexpr = 32 if is_ungated(ACTIVATION) else 64  # gate's rows, then up's
    lane = tl.arange(0, LANES)
    matrix, block = lane // 32, group * 2 + lane // 16 - lane // 32 * 2
    row = block * 16 + lane % 16
    x_row = pair // top_k + tl.arange(0, 1)
    plain += slot * slot_words * 2
    if FORM == "bf16":
        found = plain_sums(
            plain, (matrix * inner + row) * hidden, row < inner, hidden, x_words, x_row,
            x_row >= 0, 1, LANES, STAGES,
        )  # fmt: skip
    else:
        block_at = matrix * matrix_words + block * block_words(hidden_tiles, FORM)
        found = any_sums(
            words + slot * slot_words, block_at, block * 16 < inner, hidden_tiles,
            x_words, x_starts, x_scales, x_row, x_row >= 0, FORM, 1, LANES, STAGES, EMULATE,
        )  # fmt: skip
    if BIASED:
        bias = tl.load(plain + bias_at + matrix * inner + row, row < inner, 0.0)
        found += bias.to(tl.float32)[None, :]
    if is_ungated(ACTIVATION):
        values = activated(found, found, ACTIVATION)
    else:
        gate, up = tl.split(tl.permute(tl.reshape(found, (1, 2, 32)), (0, 2, 1)))
        values = activated(gate, up, ACTIVATION)
    column = group * 32 + tl.arange(0, 32)[None, :]
    if FORM == "bf16":
        tl.store(codes + pair * inner + column, stored(values, tl.bfloat16), column < inner)
    else:
        found_codes, start, size = quantised(values, DOWN)
        one = pair * inner_groups + group + tl.arange(0, 1)
        tl.store(codes + pair * inner_groups * 32 + column, found_codes.to(tl.int8))
        tl.store(starts + one, start)
        tl.store(sizes + one, size)


@triton.jit(do_not_specialize=["first_cell"])
def expert_down(
    ids, table, first_cell, words, plain, slot_words, down_words, bias_at,
    hidden, inner, inner_tiles, x_words, x_starts, x_scales, out,
    FORM: tl.constexpr, BIASED: tl.constexpr, STAGES: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """Compute 32 outputs of down · (output of expert_inner), into the pair's row of out."""
    pair = tl.program_id(0)
    slot = slot_of(ids, table, first_cell, pair)
    if slot < 0:
        return
    row = tl.program_id(1) * 32 + tl.arange(0, 32)
    x_row = pair + tl.arange(0, 1)
    plain += slot * slot_words * 2
    if FORM == "bf16":
        found = plain_sums(
            plain + down_words * 2, row * inner, row < hidden, inner, x_words, x_row, x_row >= 0,
            1, 32, STAGES,
        )  # fmt: skip
    else:
        block_at = row // 16 * block_words(inner_tiles, FORM)
        found = any_sums(
            words + slot * slot_words + down_words, block_at, row // 16 * 16 < hidden,
            inner_tiles, x_words, x_starts, x_scales, x_row, x_row >= 0, FORM, 1, 32, STAGES,
            EMULATE,
        )  # fmt: skip
    if BIASED:
        found += tl.load(plain + bias_at + row, row < hidden, 0.0).to(tl.float32)[None, :]
    at = x_row[:, None].to(tl.int64) * hidden + row[None, :]
    tl.store(out + at, stored(found, out.dtype.element_ty), row[None, :] < hidden)


@triton.jit(do_not_specialize=["count"])
def linear_rows(
    words, x_words, x_starts, x_scales, out, count, outputs, columns, tiles,
    FORM: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
    EMULATE: tl.constexpr,
):  # fmt: skip
    """Compute LANES outputs of a dense matrix for ROWS rows; for bf16, words are bf16 values."""
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    x_row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    x_there = x_row < count
    if FORM == "bf16":
        found = plain_sums(
            words, row.to(tl.int64) * columns, row < outputs, columns, x_words, x_row, x_there,
            ROWS, LANES, STAGES,
        )  # fmt: skip
    else:
        block_at = row.to(tl.int64) // 16 * block_words(tiles, FORM)
        found = any_sums(
            words, block_at, row // 16 * 16 < outputs, tiles,
            x_words, x_starts, x_scales, x_row, x_there, FORM, ROWS, LANES, STAGES, EMULATE,
        )  # fmt: skip
    at = x_row[:, None].to(tl.int64) * outputs + row[None, :]
    inside = x_there[:, None] & (row[None, :] < outputs)
    tl.store(out + at, stored(found, out.dtype.element_ty), inside)


@triton.jit
def gather_rows(
    words, bytes_of, ids, out, columns, tiles, FORM: tl.constexpr, COLUMNS: tl.constexpr
):
    """Set out[t] to row ids[t] of a matrix in tiles, as dequantise_rows gives it in float32."""
    token = tl.program_id(0)
    row = tl.load(ids + token).to(tl.int64)
    k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = k < columns
    target = out + token.to(tl.int64) * columns + k
    if is_interleaved(FORM):
        found = gathered(
            words, bytes_of, row // 16 * block_words(tiles, FORM), (row % 16).to(tl.int32), k,
            inside, FORM, COLUMNS,
        )  # fmt: skip
        tl.store(target, stored(found, out.dtype.element_ty), inside)
        return
    tile_at = (row // 16 * tiles + k // 64) * tile_words(FORM)
    half, at = k // 32 % 2, k % 32
    if FORM == "q8":
        byte = half * 512 + at // 4 * 64 + at % 4
        code = tl.load(bytes_of + tile_at * 4 + row % 16 * 4 + byte, inside, 0).to(tl.int32) - 128
    elif is_odd(FORM):
        place = bytes_of + (tile_at + half * group_words(FORM)) * 4 + row % 16 * 4 + at % 4
        low = tl.load(place + at // 4 % 2 * 64, inside, 0).to(tl.int32)
        high = tl.load(place + 128, inside, 0).to(tl.int32) if FORM == "q3" else low
        code = odd_codes(low, high, at // 8, at // 4, FORM) - (7 if FORM == "q3" else 3)
    else:
        byte = half * 256 + at % 16 // 4 * 64 + at % 4
        both = tl.load(bytes_of + tile_at * 4 + row % 16 * 4 + byte, inside, 0).to(tl.int32)
        code = ((both >> (at // 16 * 4)) & 15) - 8
    lane = (row % 16).to(tl.int32) + tl.zeros((COLUMNS,), tl.int32)
    value = code.to(tl.float32) * scales_of(words, tile_at, lane, half, inside, FORM)
    tl.store(target, stored(value, out.dtype.element_ty), inside)


@triton.jit
def combine_rows(rows, weights, out, top_k, width, COLUMNS: tl.constexpr):
    """Set out[t] to Σ_k weights[t, k] · rows[t, k], in order of k in float32, rounded once."""
    token = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros((COLUMNS,), tl.float32)
    for k in range(top_k):
        place = token * top_k + k
        row = tl.load(rows + place.to(tl.int64) * width + column, inside, 0.0).to(tl.float32)
        term = row * tl.load(weights + place)
        total = tl.where(k == 0, term, total + term)
    tl.store(out + token.to(tl.int64) * width + column, stored(total, out.dtype.element_ty), inside)
