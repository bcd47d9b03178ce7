"""Triton functions that read weights and compute with them, shared by our kernels.

Imported only where there is a GPU, because it imports Triton. native/kernels/tiles.h draws the
tiles and defines their arithmetic. kernels.h defines the order of bf16's sums, and activations.h
the activations.

Every step gives the bits of the CPU's kernels. Sums within a group are exact integers, in any
order. Rounded steps follow the CPU's order. So kernels must be launched without contraction into
fused operations (FUSION below). Divisions are div_rn, and fused operations are written tl.fma.

Letters of shapes:
    R  rows of activations      L  lanes, which are rows of weights (outputs)
    C  groups read at once      V  32-bit words of one row of a group
"""

# ruff: noqa: N803, N806 (constants of a Triton kernel are written in capitals)
from __future__ import annotations

import triton
import triton.language as tl

FUSION = {"enable_fp_fusion": False}  # options of every launch
FLIP = tl.constexpr(-0x7F7F7F80)  # the upper bit of each byte
CHUNK = tl.constexpr(4)  # groups: 4 x 4 words x 32 rows of q4 are 2 KiB, 16 bytes a thread


@triton.jit
def dot4(weights, codes, total, EMULATE: tl.constexpr):
    """Return total plus the sum of 4 unsigned weight bytes times signed codes: [R, C, V, L]."""
    if EMULATE:  # Triton's interpreter does not support assembly
        shift = 8 * tl.arange(0, 4)[None, None, None, None, :]
        ours = (weights[:, :, :, :, None] >> shift) & 255
        return total + tl.sum(ours * ((codes[:, :, :, :, None] << (24 - shift)) >> 24), 4)
    return tl.inline_asm_elementwise(
        "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [weights, codes, total],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def doubled_e2m1(codes):
    """Return 12 + twice the value of four E2M1 codes, one code a byte (kMxfp4Codes)."""
    ones = 0x01010101
    low = codes & ones
    from_2 = (codes >> 2) & ones
    from_3 = from_2 & (codes >> 1)
    value = (codes & 0x07070707) + (from_2 & low) + 2 * from_3 + 2 * (from_3 & low)
    minus = ((codes >> 3) & ones) * 255
    return 0x0C0C0C0C + (value & ~minus) - (value & minus)  # no byte carries into the next


@triton.jit
def doubled_numbers(words):
    """Return twice the values of eight E2M1 codes a word as signed bytes: low and high nibbles.

    `doubled_e2m1` converts four codes at once, with more instructions but fewer registers.
    """
    number = words & 0x77777777
    upper = (words >> 2) & 0x11111111  # codes 4 … 7 need 0, 1, 2, 5 more
    value = number + (number & (upper * 3)) + 2 * (number & (number >> 1) & upper)  # up to 12
    minus, high_minus = ((words >> 3) & 0x01010101) * 255, ((words >> 7) & 0x01010101) * 255
    low = ((value & 0x0F0F0F0F) ^ minus) - minus + FLIP  # 128 ± 12: the result has no carries
    high = (((value >> 4) & 0x0F0F0F0F) ^ high_minus) - high_minus + FLIP
    return low ^ FLIP, high ^ FLIP


@triton.jit
def signed_bytes(low, high, LANES: tl.constexpr):
    """Return the bytes of a group, int8 [32, L], from words [L, 4] of its first and last 16."""
    words = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (LANES, 8))
    even = tl.join(words.to(tl.int8), (words >> 16).to(tl.int8))
    odd = tl.join((words >> 8).to(tl.int8), (words >> 24).to(tl.int8))
    return tl.trans(tl.reshape(tl.join(even, odd), (LANES, 32)))


@triton.jit
def in_order(values, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Split [R, C, L] into C tensors [R, L], in order."""
    pairs = tl.reshape(tl.permute(values, (0, 2, 1)), (ROWS, LANES, 2, 2))
    even, odd = tl.split(pairs)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.constexpr_function
def tile_words(form):
    """Return the 32-bit words of a tile."""
    if form == "q8":
        return 272
    if form == "mxfp4":
        return 136
    if form == "q4" or form == "nvfp4":
        return 144
    if form == "q3" or form == "q2":
        return 112 if form == "q3" else 80
    return 576 if form == "q4k" else (704 if form == "q5k" else 840)


@triton.constexpr_function
def group_words(form):
    """Return the words of a group's codes in a tile of q8, q4, q3, q2 or mxfp4."""
    if form == "q8":
        return 128
    return 48 if form == "q3" else (32 if form == "q2" else 64)


@triton.constexpr_function
def is_odd(form):
    return form == "q3" or form == "q2"


@triton.jit
def odd_codes(low, high, i, v, FORM: tl.constexpr):
    """Return the doubled codes of word v = 2i or 2i + 1, from words with their low and high bits.

    high has bit 2 of a group's codes; q2 does not use it.
    """
    codes = ((low >> (2 * i)) & 0x03030303) << 1
    return codes | (((high >> v) & 0x01010101) << 3) if FORM == "q3" else codes


@triton.constexpr_function
def factor_words(form):
    """Return the words of a row block before its first tile."""
    return 16 if form == "nvfp4" else 0


@triton.jit
def block_words(tiles, FORM: tl.constexpr):
    """Return the words of a row block."""
    return tiles * tile_words(FORM) + factor_words(FORM)


@triton.jit
def scales_of(words, tile_at, row, half, mask, FORM: tl.constexpr):
    """Return the scales of rows in tiles that begin at word tile_at, in float32, where mask is set.

    They are read as words, each by the 2 or 4 lanes that share it. Triton overlaps only loads of at
    least that width with arithmetic.
    """
    if FORM == "mxfp4":
        word = tl.load(words + tile_at + 128 + half * 4 + row // 4, mask, 0)
        byte = (word >> (row % 4 * 8)) & 255  # E8M0: 0 means 2^-127
        return tl.maximum(byte << 23, 0x00400000).to(tl.float32, bitcast=True)
    FIRST: tl.constexpr = 2 * group_words(FORM)
    word = tl.load(words + tile_at + FIRST + half * 8 + row // 2, mask, 0)
    return (word >> (row % 2 * 16)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def tile_sums(
    words, block_at, there, tiles, x_words, x_starts, x_scales, x_row, x_there,
    FORM: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
    EMULATE: tl.constexpr,
):  # fmt: skip
    """Compute products of quantised rows with rows of a matrix in tiles: [R, L] float32.

    Lanes are whole row blocks: block_at [L] is the word at which a lane's block begins. Lanes that
    are not `there` are 0. x_row [R] names rows of activations. The compiler loads 16 bytes a thread
    only if it can prove that 16 lanes are neighbours. It cannot if lanes are taken modulo more than
    16.
    """
    WORDS: tl.constexpr = 8 if FORM == "q8" else (2 if is_odd(FORM) else 4)
    TILE: tl.constexpr = tile_words(FORM)
    groups = 2 * tiles
    word = tl.arange(0, WORDS)
    row = tl.arange(0, LANES) % 16
    total = tl.zeros((ROWS, LANES), tl.float32)
    for begin in tl.range(0, groups, CHUNK, num_stages=STAGES):
        group = begin + tl.arange(0, CHUNK)
        inside = group < groups
        tile, half = group // 2 * TILE, group % 2
        at = words + (tile + half * group_words(FORM))[:, None, None]
        at += (block_at + row)[None, None, :]
        mask = inside[:, None, None] & there[None, None, :]
        weights = tl.load(at + word[None, :, None] * 16, mask, 0)[None, :, :, :]
        x_at = x_row[:, None] * groups + group[None, :]  # [R, C]
        x_inside = x_there[:, None] & inside[None, :]
        x_word = x_words + 8 * x_at[:, :, None] + word[None, None, :]
        codes = tl.load(x_word, x_inside[:, :, None], 0)[:, :, :, None]
        none = tl.zeros((ROWS, CHUNK, WORDS, LANES), tl.int32)
        if FORM == "q8":
            dots = dot4(weights, codes, none, EMULATE)
        elif is_odd(FORM):
            high = weights
            if FORM == "q3":
                high = tl.load(at + 32, mask, 0)[None, :, :, :]
            dots = none
            for i in tl.static_range(4):
                ours = odd_codes(weights, high, i, 2 * i + word[None, None, :, None], FORM)
                codes = tl.load(x_word + 2 * i, x_inside[:, :, None], 0)[:, :, :, None]
                dots = dot4(ours, codes, dots, EMULATE)
        else:
            later = tl.load(x_word + 4, x_inside[:, :, None], 0)[:, :, :, None]
            low, high = weights & 0x0F0F0F0F, (weights >> 4) & 0x0F0F0F0F
            if FORM == "mxfp4":
                low, high = doubled_e2m1(low), doubled_e2m1(high)
            dots = dot4(high, later, dot4(low, codes, none, EMULATE), EMULATE)
        starts = tl.load(x_starts + x_at, x_inside, 0)
        sums = (tl.sum(dots, 2) + starts[:, :, None]).to(tl.float32)  # [R, C, L], exact
        sizes = scales_of(
            words, tile[:, None] + block_at[None, :], row[None, :], half[:, None],
            inside[:, None] & there[None, :], FORM,
        )  # fmt: skip
        x_sizes = tl.load(x_scales + x_at, x_inside, 0.0)
        sizes = sizes[None, :, :] * x_sizes[:, :, None]
        d0, d1, d2, d3 = in_order(sums, ROWS, LANES)
        s0, s1, s2, s3 = in_order(sizes, ROWS, LANES)
        total = tl.fma(d0, s0, total)
        total = tl.fma(d1, s1, total)
        total = tl.fma(d2, s2, total)
        total = tl.fma(d3, s3, total)
    return tl.where(there[None, :], total, 0.0)


@triton.jit
def plain_sums(
    weights, row_at, there, columns, x, x_row, x_there,
    ROWS: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute products of bf16 rows with bf16 matrix rows at row_at [L]: [R, L] float32."""
    column = tl.arange(0, 32)
    parts = tl.zeros((ROWS, LANES, 32), tl.float32)
    for begin in tl.range(0, columns, 32, num_stages=STAGES):
        k = begin + column
        inside = k < columns
        row = tl.load(
            weights + row_at[:, None] + k[None, :], there[:, None] & inside[None, :], 0.0
        ).to(tl.float32)[None, :, :]
        values = tl.load(
            x + x_row[:, None] * columns + k[None, :], x_there[:, None] & inside[None, :], 0.0
        ).to(tl.float32)[:, None, :]
        parts = tl.fma(
            tl.broadcast_to(row, (ROWS, LANES, 32)),
            tl.broadcast_to(values, (ROWS, LANES, 32)), parts,
        )  # fmt: skip
    even, odd = tl.split(tl.reshape(parts, (ROWS, LANES, 16, 2)))
    total = even + odd
    for level in tl.static_range(3):  # s[l] += s[l + 8], s[l + 4], s[l + 2]
        half = tl.reshape(total, (ROWS, LANES, 2, 8 >> level))
        first, second = tl.split(tl.permute(half, (0, 1, 3, 2)))
        total = first + second
    first, second = tl.split(total)
    return first + second


@triton.jit
def quantised(values, FORM: tl.constexpr):
    """Quantise [G, 32] float32 to codes [G, 32] int32, starts [G] int32, scales [G] float32."""
    OTHER: tl.constexpr = 7 if FORM == "q3" else (3 if FORM == "q2" else 12)
    ZERO: tl.constexpr = 128 if FORM == "q8" else (8 if FORM == "q4" else OTHER)
    HALF: tl.constexpr = 0.5 if FORM == "mxfp4" or FORM == "nvfp4" else 1.0
    most = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # a NaN is above infinity
    magnitude = most.to(tl.float32, bitcast=True)
    number = most < 0x7F800000
    used = number & (magnitude >= 1e-30)
    inverse = tl.div_rn(127.0, tl.where(used, magnitude, 1.0))
    rounded = values * inverse[:, None] + 12582912.0  # 1.5 · 2^23: nearest even, in the low bits
    codes = tl.where(used[:, None], rounded.to(tl.int32, bitcast=True) - 0x4B400000, 0)
    scales = tl.div_rn(magnitude, 127.0) * HALF
    scales = tl.where(used, scales, tl.where(number, 0.0, float("nan")))
    if FORM == "q4k" or FORM == "q5k":
        return codes, -tl.sum(codes, 1), scales
    if FORM == "q6k" or FORM == "nvfp4":  # two int16 (activations.h)
        first = tl.sum(tl.where(tl.arange(0, 32)[None, :] < 16, codes, 0), 1)
        return codes, (first & 0xFFFF) | ((tl.sum(codes, 1) - first) << 16), scales
    return codes, -ZERO * tl.sum(codes, 1), scales


@triton.jit
def stored(values, Kind: tl.constexpr):
    """Convert float32 to Kind; bf16 to nearest even, where Triton's interpreter truncates."""
    if Kind == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        number = (bits & 0x7FFFFFFF) <= 0x7F800000
        bits = tl.where(number, bits + 0x7FFF + ((bits >> 16) & 1), bits | 0x400000)
        values = (bits & -65536).to(tl.float32, bitcast=True)
    return values.to(Kind)


@triton.jit
def exponential(x):
    """Return exp(x) by the polynomial of activations.cpp; NaN stays."""
    x = tl.where(x < -88.0, -88.0, x)
    x = tl.where(x > 88.0, 88.0, x)
    n = (x * 1.44269504 + 12582912.0) - 12582912.0
    r = (x - n * 0.693359375) - n * -2.12194440e-4
    p = r * 1.9875691500e-4 + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    p = (p * r) * r + r + 1.0
    exponent = (n + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    return p * ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.constexpr_function
def is_ungated(activation):
    return activation == "relu" or activation == "relu2"


@triton.jit
def activated(gate, up, ACTIVATION: tl.constexpr):
    """Apply an expert's activation to gate and up; relu and relu2 do not use `gate`."""
    if ACTIVATION == "relu":
        return tl.where(up < 0.0, 0.0, up)
    if ACTIVATION == "relu2":
        up = tl.where(up < 0.0, 0.0, up)
        return up * up
    if ACTIVATION == "swiglu":
        return tl.div_rn(gate, 1.0 + exponential(-gate)) * up
    if ACTIVATION == "geglu":
        slope = (gate * gate) * -0.0713548163 + -1.59576912
        return tl.div_rn(gate, 1.0 + exponential(gate * slope)) * up
    if ACTIVATION == "swiglu10":
        gate = tl.where(gate > 10.0, 10.0, gate)
        up = tl.where(up > 10.0, 10.0, up)
        up = tl.where(up < -10.0, -10.0, up)
        return tl.div_rn(gate, 1.0 + exponential(-gate)) * up
    gate = tl.where(gate > 7.0, 7.0, gate)
    up = tl.where(up > 7.0, 7.0, up)
    up = tl.where(up < -7.0, -7.0, up)
    return tl.div_rn(gate, 1.0 + exponential(gate * -1.702)) * (up + 1.0)
