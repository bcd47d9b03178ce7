"""Compute attention of the newest token over its KV cache, in Triton.

Imported only where there is a GPU. The token's position is read on the device.

The keys that the token sees are cut into SPLITS parts of whole blocks, as equal as possible. A
program computes one part for up to 16 heads that share a key head (flash decoding,
arXiv 2311.01282, section 2). Another program joins the parts, in order.

The cut depends only on the number of keys, so a result depends only on the text. The grid does not
depend on it, so the same launches serve every token, as CUDA graphs require.
"""

# ruff: noqa: N803 (constants of a Triton kernel are written in capitals)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeinf.offload.gpu_kernels.expert_ffn import INTERPRETED
from moeinf.offload.gpu_kernels.tiles import FUSION, stored

SPLITS = 64  # parts of a text: with one key head (latent attention), 64 multiprocessors work
_HEADS = 16  # rows of the smallest product on tensor cores
_PIECE = 64  # columns of a key at a time
_BLOCK = 64  # keys at a time; fewer where values are wide
_WIDE = 256
_COLUMNS = 64  # columns of a head that one program joins


@triton.jit
def part_of(positions, window, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """Return the first key that is seen, the number of seen keys, and the keys per part."""
    length = tl.load(positions).to(tl.int32) + 1
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    count = length - first
    return first, count, tl.cdiv(tl.cdiv(count, SPLITS), BLOCK) * BLOCK


@triton.jit
def wide_dot(a, b, total, EMULATE: tl.constexpr):
    """Return total + a · b in float32, without loss for bf16 values."""
    if EMULATE:  # the interpreter would multiply bf16's bits
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit(do_not_specialize=["window"], do_not_specialize_on_alignment=["positions"])
def attend_part(
    q, k, v, positions, sums, tops, weights, scale, window,
    per_group, heads, width, value_width, k_head, k_token, v_head, v_token,
    BLOCK: tl.constexpr, PIECE: tl.constexpr, HEADS: tl.constexpr, VALUES: tl.constexpr,
    SPLITS: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """Compute one part of the keys for HEADS query heads that share key head program_id(1).

    q [H, W]; k and v with strides per head and token. Outputs, float32: tops [SPLITS, H], the
    highest score; sums [SPLITS, H, VALUES], of exp(score - top) times value; weights [SPLITS, H],
    of exp(score - top).
    """
    part, group = tl.program_id(0), tl.program_id(1)
    first, count, size = part_of(positions, window, BLOCK, SPLITS)
    begin = first + part * size
    end = tl.minimum(begin + size, first + count)
    if begin >= end:
        return
    inside = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    head, there = group * per_group + inside, inside < per_group
    column, value = tl.arange(0, PIECE), tl.arange(0, VALUES)
    k += group.to(tl.int64) * k_head
    v += group.to(tl.int64) * v_head
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    weight = tl.zeros((HEADS,), tl.float32)
    total = tl.zeros((HEADS, VALUES), tl.float32)
    for at in range(begin, end, BLOCK):
        key = at + tl.arange(0, BLOCK)
        seen = key < end
        scores = tl.zeros((HEADS, BLOCK), tl.float32)
        for left in range(0, width, PIECE):
            ours = tl.load(
                q + head[:, None] * width + left + column[None, :],
                there[:, None] & (left + column < width)[None, :], 0.0,
            )  # fmt: skip
            theirs = tl.load(
                k + key[None, :].to(tl.int64) * k_token + left + column[:, None],
                seen[None, :] & (left + column < width)[:, None], 0.0,
            )  # fmt: skip
            scores = wide_dot(ours, theirs, scores, EMULATE)
        scores = tl.where(seen[None, :], scores * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shrunk = tl.exp(top - higher)
        shares = tl.exp(scores - higher[:, None])
        weight = weight * shrunk + tl.sum(shares, 1)
        values = tl.load(
            v + key[:, None].to(tl.int64) * v_token + value[None, :],
            seen[:, None] & (value < value_width)[None, :], 0.0,
        )  # fmt: skip
        total = total * shrunk[:, None]
        if v.dtype.element_ty == tl.bfloat16:  # two bf16 halves keep 16 bits of a share
            high = shares.to(tl.bfloat16)
            low = (shares - high.to(tl.float32)).to(tl.bfloat16)
            total = wide_dot(high, values, total, EMULATE)
            total = wide_dot(low, values, total, EMULATE)
        else:
            total = wide_dot(shares, values, total, EMULATE)
        top = higher
    at = part * heads + head
    tl.store(sums + at[:, None] * VALUES + value[None, :], total, there[:, None])
    tl.store(tops + at, top, there)
    tl.store(weights + at, weight, there)


@triton.jit(do_not_specialize=["window"], do_not_specialize_on_alignment=["positions"])
def attend_join(
    sums, tops, weights, positions, sinks, out, window, heads, value_width,
    BLOCK: tl.constexpr, VALUES: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
    SUNK: tl.constexpr,
):  # fmt: skip
    """Join all parts for COLUMNS of one head; a sink is a logit without a value."""
    head = tl.program_id(0)
    _, count, size = part_of(positions, window, BLOCK, SPLITS)
    part = tl.arange(0, SPLITS)
    at, there = part * heads + head, part * size < count
    theirs = tl.load(tops + at, there, float("-inf"))
    top = tl.max(theirs, 0)
    if SUNK:
        sink = tl.load(sinks + head).to(tl.float32)
        top = tl.maximum(top, sink)
    shrunk = tl.exp(theirs - top)
    weight = tl.sum(tl.load(weights + at, there, 0.0) * shrunk, 0)
    if SUNK:
        weight += tl.exp(sink - top)
    value = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    parts = tl.load(sums + at[:, None] * VALUES + value[None, :], there[:, None], 0.0)
    found = stored(tl.div_rn(tl.sum(parts * shrunk[:, None], 0), weight), out.dtype.element_ty)
    tl.store(out + head * value_width + value, found, value < value_width)


def attend_newest(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute attention of one token to itself and all earlier ones: q [H, W] -> [H, V], in `out`.

    k [G, S, W] and v [G, S, V] are a cache with room for S tokens. Tokens up to `position` ([1]
    int64 on the device) are filled. Query head h uses key head h // (H / G). With a window of n,
    the token sees itself and the n - 1 tokens before it. sinks [H]: a logit per head that takes
    its share of the softmax. Tensors are bf16 or float32; sums are float32.
    """
    (heads, width), groups, values = q.shape, len(k), v.shape[2]
    assert k.stride(2) == v.stride(2) == 1
    padded = max(16, triton.next_power_of_2(values))
    block = _BLOCK if padded < _WIDE else _BLOCK // 2
    sums = torch.empty(SPLITS, heads, padded, dtype=torch.float32, device=q.device)
    tops, weights = torch.empty(2, SPLITS, heads, dtype=torch.float32, device=q.device)
    out = q.new_empty(heads, values) if out is None else out
    assert out.is_contiguous()
    per_group = heads // groups
    attend_part[(SPLITS, groups, triton.cdiv(per_group, _HEADS))](
        q.contiguous(), k, v, position, sums, tops, weights, scale, window or 0,
        per_group, heads, width, values, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        BLOCK=block, PIECE=_PIECE, HEADS=_HEADS, VALUES=padded, SPLITS=SPLITS,
        EMULATE=INTERPRETED, num_warps=8 if q.dtype == torch.float32 else 4, **FUSION,
    )  # fmt: skip
    columns = min(_COLUMNS, padded)
    attend_join[(heads, padded // columns)](
        sums, tops, weights, position, q if sinks is None else sinks, out, window or 0,
        heads, values, BLOCK=block, VALUES=padded, SPLITS=SPLITS, COLUMNS=columns,
        SUNK=sinks is not None, num_warps=4, **FUSION,
    )  # fmt: skip
    return out
