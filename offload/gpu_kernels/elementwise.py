"""Compute the steps between the products of a decode step, in Triton: norms, rope, cache, SwiGLU.

Imported only where there is a GPU. In torch each step is 5 to 10 kernels, whose launches take
longer than reading such short rows.

Values are rounded where torch rounds them (models/layers/norms.py, rope.py), so only the order of a
sum of squares differs. A token's position is read on the device, and no grid depends on it. So the
same launches serve every token, as CUDA graphs require. A row of a batch is passed as a number: an
address with another alignment would be compiled again.
"""

# ruff: noqa: N803, N806 (constants of a Triton kernel are written in capitals)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeinf.offload.gpu_kernels.tiles import FUSION, stored

_PIECE = 2048  # columns of a row at a time
_COLUMNS = 1024  # values of SwiGLU in one program


@triton.jit
def inverse_rms(total, width, eps):
    """Return 1 / sqrt(total / width + eps); total is a sum of squares."""
    mean = tl.div_rn(total, width * 1.0)
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))


@triton.jit
def weighted(values, inverse, weight, KIND: tl.constexpr, WIDE: tl.constexpr):
    """Return values · inverse · weight, all float32, as KIND; if not WIDE, first round to KIND."""
    values = values * inverse
    if not WIDE:
        values = stored(values, KIND).to(tl.float32)
    return stored(values * weight, KIND)


@triton.jit
def norm_rows(x, weight, out, eps, width, PIECE: tl.constexpr, WIDE: tl.constexpr):
    """Normalise a row of x [R, D] into out, weight [D]; the second read hits a cache."""
    KIND: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * width
    piece = tl.arange(0, PIECE)
    squares = tl.zeros((PIECE,), tl.float32)
    for begin in range(0, width, PIECE):
        column = begin + piece
        values = tl.load(x + row + column, column < width, 0.0).to(tl.float32)
        squares += values * values
    inverse = inverse_rms(tl.sum(squares, 0), width, eps)
    for begin in range(0, width, PIECE):
        column = begin + piece
        there = column < width
        values = tl.load(x + row + column, there, 0.0).to(tl.float32)
        scale = tl.load(weight + column, there, 0.0).to(tl.float32)
        tl.store(out + row + column, weighted(values, inverse, scale, KIND, WIDE), there)


@triton.jit
def clipped(values, clip, KIND: tl.constexpr):
    """Return the values limited to -clip … clip; NaN stays."""
    values = tl.where(values > clip, clip, values)
    return stored(tl.where(values < -clip, -clip, values), KIND).to(tl.float32)


@triton.jit
def turned(
    x, weight, cos, sin, eps, clip, width, angles,
    COLUMNS: tl.constexpr, NORMED: tl.constexpr, WIDE: tl.constexpr, CLIPPED: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Return the head at x, normed, clipped, its first 2 · angles columns rotated: [COLUMNS].

    Each column is read with its partner in the rotation: 2i with 2i + 1 if PAIRS, else i with
    i + angles.
    """
    KIND: tl.constexpr = x.dtype.element_ty
    column = tl.arange(0, COLUMNS)
    there, turning = column < width, column < 2 * angles
    if PAIRS:
        other, angle, first = column ^ 1, column // 2, column % 2 == 0
    else:
        first = column < angles
        other = tl.where(first, column + angles, column - angles)
        angle = tl.where(first, column, other)
    mine = tl.load(x + column, there, 0.0).to(tl.float32)
    its = tl.load(x + other, turning, 0.0).to(tl.float32)
    if NORMED:
        inverse = inverse_rms(tl.sum(mine * mine, 0), width, eps)
        scale = tl.load(weight + column, there, 0.0).to(tl.float32)
        mine = weighted(mine, inverse, scale, KIND, WIDE).to(tl.float32)
        scale = tl.load(weight + other, turning, 0.0).to(tl.float32)
        its = weighted(its, inverse, scale, KIND, WIDE).to(tl.float32)
    if CLIPPED:
        mine, its = clipped(mine, clip, KIND), clipped(its, clip, KIND)
    straight = mine * tl.load(cos + angle, turning, 0.0)
    across = its * tl.load(sin + angle, turning, 0.0)
    rotated = tl.where(first, straight - across, straight + across)
    return stored(tl.where(turning, rotated, mine), KIND)


@triton.jit(do_not_specialize=["row"])
def gqa_row(
    q, k, v, q_weight, k_weight, positions, cos, sin, keys, values, out,
    q_eps, k_eps, clip, row, heads, groups, width, angles, k_head, k_token, v_head, v_token,
    COLUMNS: tl.constexpr, NORMED: tl.constexpr, WIDE: tl.constexpr, CLIPPED: tl.constexpr,
):  # fmt: skip
    """Compute one head of a row: a query, or a key or value, which is written to the cache.

    q and out [T, H, W], k and v [T, G, W], positions [T], cos and sin [T, angles].
    """
    KIND: tl.constexpr = out.dtype.element_ty
    head = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    place = tl.load(positions + row)
    cos += row * angles
    sin += row * angles
    if head < heads:
        at = (row * heads + head) * width
        found = turned(
            q + at, q_weight, cos, sin, q_eps, clip, width, angles,
            COLUMNS, NORMED, WIDE, CLIPPED, False,
        )  # fmt: skip
        tl.store(out + at + column, found, column < width)
    elif head < heads + groups:
        group = head - heads
        found = turned(
            k + (row * groups + group) * width, k_weight, cos, sin, k_eps, clip, width, angles,
            COLUMNS, NORMED, WIDE, CLIPPED, False,
        )  # fmt: skip
        keys += group.to(tl.int64) * k_head + place * k_token
        tl.store(keys + column, found, column < width)
    else:
        group = head - heads - groups
        value = tl.load(v + (row * groups + group) * width + column, column < width, 0.0)
        if CLIPPED:
            value = clipped(value.to(tl.float32), clip, KIND).to(KIND)
        values += group.to(tl.int64) * v_head + place * v_token
        tl.store(values + column, value, column < width)


@triton.jit(do_not_specialize=["row"])
def mla_row(
    q, latent, weight, positions, cos, sin, memory, out,
    eps, row, heads, nope, rope, kv_lora, m_token,
    COLUMNS: tl.constexpr, LATENT: tl.constexpr,
):  # fmt: skip
    """Rotate the rope columns of a head's query; the last program fills the cache row.

    q [T, H, nope + rope], latent [T, kv_lora + rope], out [T, H, kv_lora + rope]. The first kv_lora
    columns of out are not written.
    """
    KIND: tl.constexpr = out.dtype.element_ty
    head = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    angles = rope // 2
    cos += row * angles
    sin += row * angles
    if head < heads:
        q += (row * heads + head) * (nope + rope) + nope
        found = turned(
            q, weight, cos, sin, eps, 0.0, rope, angles, COLUMNS, False, False, False, True
        )
        out += (row * heads + head) * (kv_lora + rope) + kv_lora
        tl.store(out + column, found, column < rope)
    else:
        latent += row * (kv_lora + rope)
        memory += tl.load(positions + row) * m_token
        piece = tl.arange(0, LATENT)
        there = piece < kv_lora
        values = tl.load(latent + piece, there, 0.0).to(tl.float32)
        inverse = inverse_rms(tl.sum(values * values, 0), kv_lora, eps)
        scale = tl.load(weight + piece, there, 0.0).to(tl.float32)
        tl.store(memory + piece, weighted(values, inverse, scale, KIND, False), there)
        found = turned(
            latent + kv_lora, weight, cos, sin, eps, 0.0, rope, angles,
            COLUMNS, False, False, False, True,
        )  # fmt: skip
        tl.store(memory + kv_lora + column, found, column < rope)


@triton.jit
def gated_rows(gate, up, out, count, COLUMNS: tl.constexpr):
    """Compute silu(gate) · up, [count] each; silu is rounded before the product."""
    KIND: tl.constexpr = out.dtype.element_ty
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = at < count
    x = tl.load(gate + at, there, 0.0).to(tl.float32)
    y = tl.load(up + at, there, 0.0).to(tl.float32)
    less = tl.exp(-tl.abs(x))  # never overflows
    x = stored(tl.div_rn(tl.where(x < 0, x * less, x), 1.0 + less), KIND).to(tl.float32)
    tl.store(out + at, stored(x * y, KIND), there)


def rms_norm(x: Tensor, weight: Tensor, eps: float, wide: bool) -> Tensor:
    """Return x [R, …, D] / sqrt(mean(x²) + eps) · weight [D], in the shape and type of x.

    wide: multiply by the weight (float32 or x's type) before the cast. Otherwise the weight has x's
    type and multiplies after the cast.
    """
    x, width = x.contiguous(), len(weight)
    assert wide or weight.dtype == x.dtype
    out = torch.empty_like(x)
    piece = max(16, min(_PIECE, triton.next_power_of_2(width)))
    norm_rows[(x.numel() // width,)](
        x, weight, out, eps, width,
        PIECE=piece, WIDE=wide, num_warps=max(1, piece // 256), **FUSION,
    )  # fmt: skip
    return out


def gqa_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row: int,
    angles: tuple[Tensor, Tensor],
    positions: Tensor,
    planes: tuple[Tensor, Tensor],
    out: Tensor,
    norms: tuple[tuple[Tensor, float], tuple[Tensor, float]] | None = None,
    wide: bool = False,
    clip: float | None = None,
) -> None:
    """Norm, clip and rotate by halves row `row` of q [T, H·W]; the same for k and v [T, G·W].

    The queries go to out [T, H, W], key and value to place positions[row] of planes [G, S, W].
    Values are only clipped.

    angles: cos and sin [T, A] float32, for the first 2 · A columns of a head.
    norms: weight [W] and eps, for queries and for keys. wide: see rms_norm.
    """
    (cos, sin), (keys, values) = angles, planes
    (_, heads, width), groups = out.shape, len(keys)
    assert keys.stride(2) == values.stride(2) == 1
    assert out.is_contiguous()
    (q_weight, q_eps), (k_weight, k_eps) = norms or ((out, 0.0), (out, 0.0))  # not read
    columns = max(16, triton.next_power_of_2(width))
    gqa_row[(heads + 2 * groups,)](
        q.contiguous(), k.contiguous(), v.contiguous(), q_weight, k_weight,
        positions, cos.contiguous(), sin.contiguous(), keys, values, out,
        q_eps, k_eps, clip or 0.0, row, heads, groups, width, cos.shape[1],
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        COLUMNS=columns, NORMED=norms is not None, WIDE=wide, CLIPPED=clip is not None,
        num_warps=max(1, columns // 256), **FUSION,
    )  # fmt: skip


def mla_heads(
    q: Tensor,
    latent: Tensor,
    row: int,
    angles: tuple[Tensor, Tensor],
    positions: Tensor,
    memory: Tensor,
    out: Tensor,
    norm: tuple[Tensor, float],
) -> None:
    """Rotate by pairs row `row` of q [T, H·(nope + rope)] and latent [T, C + rope].

    The rope columns of the queries go to the last columns of out [T, H, C + rope]. The latent and
    the key that all heads share go to place positions[row] of memory [1, S, C + rope].

    angles: cos and sin [T, rope / 2] float32.
    norm: weight [C] and eps of the latent's RMSNorm, which multiplies after the cast.
    """
    (cos, sin), (weight, eps) = angles, norm
    heads, kv_lora, rope = out.shape[1], len(weight), 2 * cos.shape[1]
    assert weight.dtype == latent.dtype
    assert memory.stride(2) == 1
    assert out.is_contiguous()
    latents = max(16, triton.next_power_of_2(kv_lora))
    mla_row[(heads + 1,)](
        q.contiguous(), latent.contiguous(), weight,
        positions, cos.contiguous(), sin.contiguous(), memory, out,
        eps, row, heads, q.shape[1] // heads - rope, rope, kv_lora, memory.stride(1),
        COLUMNS=max(16, triton.next_power_of_2(rope)), LATENT=latents,
        num_warps=max(1, latents // 256), **FUSION,
    )  # fmt: skip


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up, of any shape."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    gated_rows[(triton.cdiv(gate.numel(), _COLUMNS),)](
        gate, up, out, gate.numel(), COLUMNS=_COLUMNS, num_warps=4, **FUSION
    )
    return out
