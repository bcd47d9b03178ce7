"""Triton functions for tiles of interleaved blocks: q4k, q5k, q6k and nvfp4.

tiles.py and grouped_gemm.py call these; their letters of shapes are used here, too. W are words of
weights: a tile is a matrix of words [W, 16], a row of it per row of the matrix. A turn of a loop
reads a unit: neighbouring groups whose codes share words.

    q4k, q5k    2 groups, which are the two nibbles of 8 words
    q6k         4 groups: nibbles of 16 words, and 2 bits each of 8 more
    nvfp4       1 group: nibbles of 4 words
"""

# ruff: noqa: N803, N806 (constants of a Triton kernel are written in capitals)
from __future__ import annotations

import triton
import triton.language as tl

from moeinf.offload.gpu_kernels.tiles import (
    FLIP,
    dot4,
    doubled_e2m1,
    doubled_numbers,
    factor_words,
    signed_bytes,
    tile_sums,
    tile_words,
)


@triton.constexpr_function
def is_interleaved(form):
    return form == "q4k" or form == "q5k" or form == "q6k" or form == "nvfp4"


@triton.constexpr_function
def unit_groups(form):
    return 4 if form == "q6k" else (1 if form == "nvfp4" else 2)


@triton.constexpr_function
def tile_units(form):
    return 4 if form == "q4k" or form == "q5k" else 2


@triton.jit
def half_at(word, second):
    """Return the lower or upper float16 of words, in float32."""
    return (word >> (second * 16)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def first_word(unit, part, FORM: tl.constexpr):
    """Return the word of a tile at which the 8 (nvfp4: 4) words with a group's low bits begin."""
    if FORM == "q4k":
        return 4 + 8 * unit
    if FORM == "q5k":
        return 12 + 8 * unit
    if FORM == "q6k":
        return 16 * unit + 8 * (part % 2)
    return 1 + 4 * unit


@triton.jit
def whole_codes(low, high, unit, part: tl.constexpr, FORM: tl.constexpr):
    """Return words of codes of group `part` of a unit, from words with their low and high bits."""
    if FORM == "q4k":
        return (low >> (4 * part)) & 0x0F0F0F0F
    if FORM == "q5k":
        return ((low >> (4 * part)) & 0x0F0F0F0F) | (
            ((high >> (2 * unit + part)) & 0x01010101) << 4
        )
    up = (high << 4) if part == 0 else ((high << 2) if part == 1 else high >> (2 * part - 4))
    return ((low >> (part // 2 * 4)) & 0x0F0F0F0F) | (up & 0x30303030)


@triton.jit
def high_word(unit, FORM: tl.constexpr):
    """Return the word of a tile at which the 8 words with the high bits of codes begin."""
    return 4 if FORM == "q5k" else 32 + 8 * unit


@triton.jit
def six_bits(low, high, j, upper, FOURTH: tl.constexpr):
    """Return 6-bit number j of four (or of the later four where `upper`), packed as in tiles.h."""
    byte = low >> (8 * j)
    later = ((high >> (8 * j + FOURTH)) & 15) | ((byte >> 2) & 48)
    return tl.where(upper, later, byte & 63).to(tl.float32)


@triton.jit
def pair_of_scales(words, at, row, mask, unit, part: tl.constexpr, FORM: tl.constexpr):
    """Return the two numbers of a group for every lane (tile_values.h), float32 [L].

    at [L] is the word of a lane's tile, row [L] its row in the tile.
    """
    if FORM == "q4k" or FORM == "q5k":
        group = 2 * unit + part
        both = tl.load(words + at + row, mask, 0)
        scales = tl.load(words + at + 16 + row, mask, 0)
        minima = tl.load(words + at + 32 + row, mask, 0)
        later = tl.load(words + at + 48 + row, mask, 0)
        s = six_bits(scales, later, group % 4, group >= 4, 0)
        m = six_bits(minima, later, group % 4, group >= 4, 4)
        return half_at(both, 0) * s, half_at(both, 1) * m
    if FORM == "q6k":
        d = half_at(tl.load(words + at + 832 + row // 2, mask, 0), row % 2)
        scales = tl.load(words + at + (48 + 2 * unit + part // 2) * 16 + row, mask, 0)
        SHIFT: tl.constexpr = 24 - part % 2 * 16
        first = ((scales << SHIFT) >> 24).to(tl.float32)
        return d * first, d * ((scales << (SHIFT - 8)) >> 24).to(tl.float32)
    scales = tl.load(words + at + row, mask, 0) >> (16 * unit)
    return half_at((scales & 255) << 7, 0) * 256.0, half_at(((scales >> 8) & 255) << 7, 0) * 256.0


@triton.jit
def add_product(total, first, second, one, two, scale, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Return fma(fma(second, two, first · one), scale, total): [R, L] of tiles.h's arithmetic.

    first is [R, L] or, for minima, [R, 1]. one and two are [L], scale is [R].
    """
    product = tl.fma(second, tl.broadcast_to(two[None, :], (ROWS, LANES)), first * one[None, :])
    return tl.fma(product, tl.broadcast_to(scale[:, None], (ROWS, LANES)), total)


@triton.jit
def factors_at(words, block_at, row, mask):
    return tl.load(words + block_at + row, mask, 0).to(tl.float32, bitcast=True)


@triton.jit
def any_sums(
    words, block_at, there, tiles, x_words, x_starts, x_scales, x_row, x_there,
    FORM: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
    EMULATE: tl.constexpr,
):  # fmt: skip
    """Return the sums of `tile_sums` for tiles of any format: [R, L] float32."""
    if not is_interleaved(FORM):
        return tile_sums(
            words, block_at, there, tiles, x_words, x_starts, x_scales, x_row, x_there,
            FORM, ROWS, LANES, STAGES, EMULATE,
        )  # fmt: skip
    UNITS: tl.constexpr = tile_units(FORM)
    GROUPS: tl.constexpr = unit_groups(FORM)
    HALF: tl.constexpr = 2 if FORM == "nvfp4" else 4  # words of a half group
    ZERO: tl.constexpr = 32 if FORM == "q6k" else 12
    groups = tiles * (UNITS * GROUPS)
    row = tl.arange(0, LANES) % 16
    half, word = tl.arange(0, 2)[:, None], tl.arange(0, HALF)[None, :]
    place, x_place = ((half * HALF + word) * 16)[:, :, None], (half * 4 + word)[None, :, :]
    mask = there[None, None, :]
    total = tl.zeros((ROWS, LANES), tl.float32)
    for turn in tl.range(0, tiles * UNITS, num_stages=STAGES):
        unit = turn % UNITS
        at = turn // UNITS * tile_words(FORM) + block_at + factor_words(FORM)
        codes_at = words + (at + row)[None, None, :] + place
        low = tl.load(codes_at + first_word(unit, 0, FORM) * 16, mask, 0)
        other, high = low, low
        if FORM == "q6k":
            other = tl.load(codes_at + first_word(unit, 1, FORM) * 16, mask, 0)
        if FORM == "q5k" or FORM == "q6k":
            high = tl.load(codes_at + high_word(unit, FORM) * 16, mask, 0)
        for part in tl.static_range(GROUPS):
            x_at = x_row * groups + turn * GROUPS + part
            x_word = x_words + 8 * x_at[:, None, None] + x_place
            codes = tl.load(x_word, x_there[:, None, None], 0)[:, :, :, None]
            none = tl.zeros((ROWS, 2, HALF, LANES), tl.int32)
            if FORM == "nvfp4":
                later = tl.load(x_word + 2, x_there[:, None, None], 0)[:, :, :, None]
                dots = dot4(doubled_e2m1(low & 0x0F0F0F0F)[None, :, :, :], codes, none, EMULATE)
                upper = doubled_e2m1((low >> 4) & 0x0F0F0F0F)[None, :, :, :]
                dots = dot4(upper, later, dots, EMULATE)
            else:
                bits = other if part % 2 == 1 and FORM == "q6k" else low
                ours = whole_codes(bits, high, unit, part, FORM)[None, :, :, :]
                dots = dot4(ours, codes, none, EMULATE)
            first, second = tl.split(tl.permute(tl.sum(dots, 2), (0, 2, 1)))
            start = tl.load(x_starts + x_at, x_there, 0)[:, None]
            scale = tl.load(x_scales + x_at, x_there, 0.0)
            one, two = pair_of_scales(words, at, row, there, unit, part, FORM)
            if FORM == "q4k" or FORM == "q5k":
                both = (first + second).to(tl.float32)
                total = add_product(total, start.to(tl.float32), both, two, one, scale, ROWS, LANES)
            else:
                first = (first - ZERO * ((start << 16) >> 16)).to(tl.float32)
                second = (second - ZERO * (start >> 16)).to(tl.float32)
                total = add_product(total, first, second, one, two, scale, ROWS, LANES)
    if FORM == "nvfp4":
        total = total * factors_at(words, block_at, row, there)[None, :]
    return tl.where(there[None, :], total, 0.0)


@triton.jit
def unsigned_bytes(words, at, part: tl.constexpr, unit, FORM: tl.constexpr):
    """Return the words [L, 4] of the first and of the last 16 codes of a group of a K type."""
    FIRST: tl.constexpr = part % 2
    first = tl.load(words + at + first_word(unit, FIRST, FORM) * 16)
    last = tl.load(words + at + first_word(unit, FIRST, FORM) * 16 + 64)
    if FORM == "q4k":
        return whole_codes(first, first, unit, part, FORM), whole_codes(
            last, last, unit, part, FORM
        )
    high = tl.load(words + at + high_word(unit, FORM) * 16)
    last_high = tl.load(words + at + high_word(unit, FORM) * 16 + 64)
    first = whole_codes(first, high, unit, part, FORM)
    return first, whole_codes(last, last_high, unit, part, FORM)


@triton.jit
def in_place(low, high, LANES: tl.constexpr):
    """Return words [L, 4] of a half group: two with lower nibbles, then two with upper ones."""
    return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (LANES, 4))


@triton.jit
def group_bytes(words, at, part: tl.constexpr, unit, FORM: tl.constexpr, LANES: tl.constexpr):
    """Return the codes of a group without their zero as signed bytes, int8 [32, L]."""
    if FORM == "nvfp4":
        from_at = words + at[:, None] + (1 + 4 * unit + tl.arange(0, 2)[None, :]) * 16
        low, high = doubled_numbers(tl.load(from_at))
        later, later_high = doubled_numbers(tl.load(from_at + 32))
        first, last = in_place(low, high, LANES), in_place(later, later_high, LANES)
        return signed_bytes(first, last, LANES)
    first, last = unsigned_bytes(
        words, at[:, None] + tl.arange(0, 4)[None, :] * 16, part, unit, FORM
    )
    if FORM == "q6k":  # 128 + code - 32 has no carries
        first = ((first ^ FLIP) - 0x20202020) ^ FLIP
        last = ((last ^ FLIP) - 0x20202020) ^ FLIP
    return signed_bytes(first, last, LANES)


@triton.jit
def exact_dot(codes, weights, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Return the product in float32, by way of the bits of 1.5 · 2^23 (grouped_gemm.py)."""
    begin = tl.full((ROWS, LANES), 0x4B400000, tl.int32)
    found = tl.dot(codes, weights, begin, out_dtype=tl.int32)
    return found.to(tl.float32, bitcast=True) - 12582912.0


@triton.jit
def block_products(
    words, block_at, there, tiles, x_codes, x_scales, x_row,
    FORM: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the sums of `any_sums`, [R, L] float32, by tensor cores; x_codes are bytes.

    Loads are not masked (grouped_gemm.product_sums). A half group is a product whose other
    activations are zero, because a step of int8 has 32 columns.
    """
    UNITS: tl.constexpr = tile_units(FORM)
    GROUPS: tl.constexpr = unit_groups(FORM)
    row, k = tl.arange(0, LANES) % 16, tl.arange(0, 32)[None, :]
    block_at = tl.where(there, block_at, 0)
    x_group = x_row.to(tl.int64) * (tiles * UNITS * GROUPS)
    total = tl.zeros((ROWS, LANES), tl.float32)
    for turn in tl.range(0, tiles * UNITS, num_stages=STAGES):
        unit = turn % UNITS
        at = turn // UNITS * tile_words(FORM) + block_at + factor_words(FORM)
        for part in tl.static_range(GROUPS):
            x_at = x_group + turn * GROUPS + part
            codes = tl.load(x_codes + x_at[:, None] * 32 + k)
            scale = tl.load(x_scales + x_at)
            weights = group_bytes(words, at + row, part, unit, FORM, LANES)
            one, two = pair_of_scales(words, at, row, True, unit, part, FORM)
            if FORM == "q4k" or FORM == "q5k":
                both = exact_dot(codes, weights, ROWS, LANES)
                start = -tl.sum(codes.to(tl.int32), 1).to(tl.float32)[:, None]
                total = add_product(total, start, both, two, one, scale, ROWS, LANES)
            else:
                none = tl.zeros((ROWS, 32), tl.int8)
                first = exact_dot(tl.where(k < 16, codes, none), weights, ROWS, LANES)
                second = exact_dot(tl.where(k < 16, none, codes), weights, ROWS, LANES)
                total = add_product(total, first, second, one, two, scale, ROWS, LANES)
    if FORM == "nvfp4":
        total = total * factors_at(words, block_at, row, True)[None, :]
    return tl.where(there[None, :], total, 0.0)


@triton.jit
def gathered(
    words, bytes_of, block_at, row, k, inside, FORM: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Return columns k [COLUMNS] of one row of a matrix, in float32, where `inside` is set."""
    UNITS: tl.constexpr = tile_units(FORM)
    GROUPS: tl.constexpr = unit_groups(FORM)
    WIDE: tl.constexpr = UNITS * GROUPS * 32
    TILE: tl.constexpr = tile_words(FORM)
    tile_at = block_at + factor_words(FORM) + k // WIDE * TILE
    group, at = k % WIDE // 32, k % 32
    unit, part = group // GROUPS, group % GROUPS
    lane = row + tl.zeros((COLUMNS,), tl.int32)
    if FORM == "nvfp4":
        half, place = at // 16, at % 16
        code = byte_at(
            bytes_of, tile_at, 1 + 4 * unit + 2 * half + place % 8 // 4, lane, at, inside
        )
        code = (code >> (place // 8 * 4)) & 15
        size = code & 7
        twice = tl.where(size < 4, size, tl.where(size < 6, 2 * size - 4, 4 * size - 16))
        number = tl.where(code > 7, -twice, twice).to(tl.float32) * 0.5
        one, two = pair_of_scales(words, tile_at, lane, inside, unit, 0, FORM)
        factor = factors_at(words, block_at, lane, inside)
        return tl.where(half == 0, one, two) * number * factor
    low = byte_at(bytes_of, tile_at, first_word(unit, part, FORM) + at // 4, lane, at, inside)
    value = tl.zeros((COLUMNS,), tl.float32)
    for p in tl.static_range(GROUPS):
        if FORM == "q4k":
            code = whole_codes(low, low, unit, p, FORM)
        else:
            high = byte_at(bytes_of, tile_at, high_word(unit, FORM) + at // 4, lane, at, inside)
            code = whole_codes(low, high, unit, p, FORM)
        one, two = pair_of_scales(words, tile_at, lane, inside, unit, p, FORM)
        if FORM == "q6k":
            found = tl.where(at < 16, one, two) * (code - 32).to(tl.float32)
        else:
            found = one * code.to(tl.float32) - two
        value = tl.where(part == p, found, value)
    return value


@triton.jit
def byte_at(bytes_of, tile_at, word, lane, at, inside):
    """Return byte at % 4 of a word of a lane's row, int32."""
    place = (tile_at + word * 16 + lane) * 4 + at % 4
    return tl.load(bytes_of + place, inside, 0).to(tl.int32)
