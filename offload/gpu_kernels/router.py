"""Compute a router in Triton: a row's logits, and the experts that they choose.

Imported only where there is a GPU.

There are two launches. The first has a program per row and expert, and reads the weights in their
own type. The second has a program per row, which takes the best remaining expert until it has K.
It breaks ties by the lowest id, like the CPU's router (native/kernels/router.cpp). A row's result
does not depend on the other rows.
"""

# ruff: noqa: N803 (constants of a Triton kernel are written in capitals)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeinf.offload.gpu_kernels.router_spec import RouterKind
from moeinf.offload.gpu_kernels.tiles import FUSION

NO_KEY = tl.constexpr(-(1 << 63))
_PIECE = 2048  # columns of a row at a time


@triton.jit
def router_logits(x, weight, bias, logits, width, PIECE: tl.constexpr, BIASED: tl.constexpr):
    """Compute one logit of x [T, D]; weight [E, D], bias [E], logits [T, E] float32."""
    expert, row = tl.program_id(0), tl.program_id(1)
    x += row * width
    weight += expert.to(tl.int64) * width
    piece = tl.arange(0, PIECE)
    parts = tl.zeros((PIECE,), tl.float32)
    for begin in range(0, width, PIECE):
        column = begin + piece
        theirs = tl.load(weight + column, column < width, 0.0).to(tl.float32)
        values = tl.load(x + column, column < width, 0.0).to(tl.float32)
        parts = tl.fma(theirs, values, parts)
    total = tl.sum(parts, 0)
    if BIASED:
        total += tl.load(bias + expert).to(tl.float32)
    tl.store(logits + row * tl.num_programs(0) + expert, total)


@triton.jit
def keys_of(values, names, there):
    """Return int64 keys in the order of the values; among equals, the lower name has the larger.

    NaN is below every number, and NO_KEY, for what is not `there`, is below NaN. A name is below
    2^31. The bits of float32 sort as integers after those of negative numbers are inverted.
    """
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    bits = tl.where(values == values, bits, -1)  # a NaN that sorts below -inf
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (bits.to(tl.int64) << 32) | (0x7FFFFFFF - names).to(tl.int64)
    return tl.where(there, keys, NO_KEY)


@triton.jit
def name_of(keys):
    """Return the name of each key, int32."""
    return 0x7FFFFFFF - (keys & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def value_of(keys):
    """Return the value of each key, float32."""
    bits = (keys >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def limited(choice, group, expert, there, kept, SECOND: tl.constexpr):
    """Return the mask [GROUPS, 1] of the `kept` best groups of choice [GROUPS, WIDTH].

    The worth of a group is its best score, or with SECOND the sum of its best two.
    """
    keys = keys_of(choice, expert, there)
    best = tl.max(keys, 1)
    worth = value_of(best)
    if SECOND:
        second = tl.max(tl.where(keys == best[:, None], NO_KEY, keys), 1)
        worth += value_of(second)
    left = keys_of(worth, group, tl.max(there.to(tl.int32), 1) > 0)
    inside = group < 0
    for _ in range(kept):
        next_best = tl.max(left, 0)
        inside = inside | (group == name_of(next_best))
        left = tl.where(left == next_best, NO_KEY, left)
    return inside[:, None]


@triton.jit
def sigmoid(x):
    less = tl.exp(-tl.abs(x))  # never overflows
    return tl.div_rn(tl.where(x < 0, less, 1.0), 1.0 + less)


@triton.jit
def choose_experts(
    logits, bias, ids, weights, experts, groups, kept, scale, jitter,
    SCORE: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr,
    CHOSEN: tl.constexpr, RENORMALISE: tl.constexpr,
):  # fmt: skip
    """Choose one row's experts: logits [T, E] -> ids [T, K] and weights [T, K]; see RouterKind.

    Experts are arranged as [GROUPS, WIDTH], powers of two that hold the model's groups.
    """
    row = tl.program_id(0)
    group, inner = tl.arange(0, GROUPS), tl.arange(0, WIDTH)
    width = experts // groups
    there = (group < groups)[:, None] & (inner < width)[None, :]
    expert = group[:, None] * width + inner[None, :]
    logits += row * experts
    found = tl.load(logits + expert, there, float("-inf"))
    choice, left = found, there
    if SCORE == "softmax":
        shares = tl.exp(found - tl.max(tl.max(found, 1), 0))
        choice = tl.div_rn(shares, tl.zeros_like(shares) + tl.sum(tl.sum(shares, 1), 0))
        if GROUPS > 1:  # outside the kept groups a score is 0, and is taken only as a last resort
            inside = limited(choice, group, expert, there, kept, False) | (choice != choice)
            choice = tl.where(inside, choice, 0.0)
    if SCORE == "sigmoid":
        choice = sigmoid(found) + tl.load(bias + expert, there, 0.0).to(tl.float32)
        if GROUPS > 1:
            left = left & limited(choice, group, expert, there, kept, True)
    keys = keys_of(choice, expert, left)
    place = tl.arange(0, CHOSEN)
    names, values = tl.zeros((CHOSEN,), tl.int32), tl.zeros((CHOSEN,), tl.float32)
    for k in range(K):
        best = tl.max(tl.max(keys, 1), 0)
        value = value_of(best)
        if SCORE == "mixer":
            larger = tl.where(there, tl.maximum(tl.abs(found), value), 1.0)
            away = tl.div_rn(value - found, larger)
            close = (keys != NO_KEY) & ~(away > 2.0 * jitter)
            shares = tl.where(close, tl.exp(found - value), 0.0)
            value = tl.div_rn(1.0, tl.sum(tl.sum(shares, 1), 0))
        names = tl.where(place == k, name_of(best), names)
        values = tl.where(place == k, value, values)
        keys = tl.where(keys == best, NO_KEY, keys)
    if SCORE == "sigmoid":  # the bias counts only in the choice, not in the weights
        values = sigmoid(tl.load(logits + names))
    if SCORE == "top_softmax":
        values = tl.exp(values - tl.max(tl.where(place < K, values, float("-inf")), 0))
    if RENORMALISE:
        total = tl.sum(tl.where(place < K, values, 0.0), 0)
        if SCORE == "sigmoid":
            total += 1e-20
        values = tl.div_rn(values, tl.zeros_like(values) + total)
    tl.store(ids + row * K + place, names.to(tl.int64), place < K)
    tl.store(weights + row * K + place, values * scale, place < K)


def route(
    x: Tensor, weight: Tensor, kind: RouterKind, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Route x [T, D] by weight [E, D], any type, to ids [T, K] int64 and weights [T, K] float32."""
    x, (experts, width) = x.contiguous(), weight.shape
    logits = torch.empty(len(x), experts, dtype=torch.float32, device=x.device)
    ids = torch.empty(len(x), kind.top_k, dtype=torch.int64, device=x.device)
    weights = torch.empty(len(x), kind.top_k, dtype=torch.float32, device=x.device)
    given = weight if bias is None else bias  # not read
    piece = max(16, min(_PIECE, triton.next_power_of_2(width)))
    router_logits[(experts, len(x))](
        x, weight, given, logits, width,
        PIECE=piece, BIASED=kind.score == "top_softmax", num_warps=4, **FUSION,
    )  # fmt: skip
    groups, kept = kind.groups
    padded = triton.next_power_of_2(groups), triton.next_power_of_2(experts // groups)
    choose_experts[(len(x),)](
        logits, given, ids, weights, experts, groups, kept, kind.scale, kind.jitter,
        SCORE=kind.score, GROUPS=padded[0], WIDTH=padded[1], K=kind.top_k,
        CHOSEN=triton.next_power_of_2(kind.top_k),
        RENORMALISE=kind.renormalise or kind.score == "top_softmax",
        num_warps=max(1, padded[0] * padded[1] // 512), **FUSION,
    )  # fmt: skip
    return ids, weights
