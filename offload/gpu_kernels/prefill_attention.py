"""Compute causal attention of many rows of one text over its KV cache, in Triton.

Imported only where there is a GPU.

The lines of a key head are its query heads, token by token. A program takes ROWS lines, so it reads
keys and values once for all of them (online softmax: FlashAttention-2, arXiv 2307.08691,
section 3.1). Blocks of keys begin at the same tokens for all rows. Blocks that no line sees are not
read. A block of which a line sees no key changes no bit of that line. So a row's result does not
depend on how a text is cut into passes.
"""

# ruff: noqa: N803 (constants of a Triton kernel are written in capitals)
from __future__ import annotations

from math import inf

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeinf.offload.gpu_kernels.decode_attention import wide_dot
from moeinf.offload.gpu_kernels.expert_ffn import INTERPRETED
from moeinf.offload.gpu_kernels.tiles import FUSION, stored

_SIZES: dict[bool, dict[float, tuple[int, int]]] = {  # widest head: (lines, keys at a time)
    False: {64: (64, 64), 192: (64, 32), 256: (32, 32), inf: (16, 16)},
    True: {192: (32, 32), 256: (32, 16), inf: (16, 16)},  # float32
}
_LOW = tl.constexpr(-3.0e38)  # below every score; unlike with -inf, _LOW - _LOW is 0


@triton.jit(do_not_specialize=["past", "tokens", "window", "heads"])
def attend_lines(
    q, k, v, sinks, out, past, tokens, window, scale,
    per_group, heads, width, value_width, k_head, k_token, v_head, v_token,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr,
    VALUES: tl.constexpr, SUNK: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """Compute ROWS lines of the query heads that share key head program_id(1).

    q [T, H, W] of the tokens from `past` on; k and v with strides per head and token; out
    [T, H, V]. Line t · per_group + p is head p of the group at token t. WIDTH: W rounded up to
    whole PIECEs.
    """
    group = tl.program_id(1)
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there, own = line < tokens * per_group, past + line // per_group
    head = group * per_group + line % per_group
    place = (line // per_group).to(tl.int64) * heads + head
    first_own = past + tl.program_id(0) * ROWS // per_group
    last_line = tl.minimum(tl.program_id(0) * ROWS + ROWS, tokens * per_group) - 1
    end = past + last_line // per_group + 1
    begin = tl.where(window > 0, tl.maximum(first_own + 1 - window, 0), 0) // BLOCK * BLOCK
    lowest = tl.where(window > 0, own - window, -1)  # the last token before the window
    column, value, inside = tl.arange(0, PIECE), tl.arange(0, VALUES), tl.arange(0, BLOCK)
    k += group.to(tl.int64) * k_head + begin.to(tl.int64) * k_token
    v += group.to(tl.int64) * v_head + begin.to(tl.int64) * v_token
    if SUNK:  # a key without a value, before all others
        top = tl.load(sinks + head, there, 0.0).to(tl.float32)
        weight = tl.full((ROWS,), 1.0, tl.float32)
    else:
        top = tl.full((ROWS,), _LOW, tl.float32)
        weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, VALUES), tl.float32)
    for at in range(begin, end, BLOCK):
        key = at + inside
        scores = tl.zeros((ROWS, BLOCK), tl.float32)
        for left in tl.static_range(0, WIDTH, PIECE):
            ours = tl.load(
                q + place[:, None] * width + left + column[None, :],
                there[:, None] & (left + column < width)[None, :], 0.0,
            )  # fmt: skip
            theirs = tl.load(
                k + inside[None, :] * k_token + left + column[:, None],
                (key < end)[None, :] & (left + column < width)[:, None], 0.0,
            )  # fmt: skip
            scores = wide_dot(ours, theirs, scores, EMULATE)
        seen = (key[None, :] <= own[:, None]) & (key[None, :] > lowest[:, None])
        scores = tl.where(seen, scores * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shrunk = tl.exp(top - higher)
        shares = tl.exp(scores - higher[:, None])
        weight = weight * shrunk + tl.sum(shares, 1)
        values = tl.load(
            v + inside[:, None] * v_token + value[None, :],
            (key < end)[:, None] & (value < value_width)[None, :], 0.0,
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
        k += BLOCK * k_token
        v += BLOCK * v_token
    found = stored(tl.div_rn(total, weight[:, None]), out.dtype.element_ty)
    tl.store(
        out + place[:, None] * value_width + value[None, :], found,
        there[:, None] & (value < value_width)[None, :],
    )  # fmt: skip


def sizes_of(dtype: torch.dtype, width: int, values: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return a program's constants and launch options: within 99 KiB, with hardly a spill."""
    piece = 64 if dtype == torch.bfloat16 else 32
    whole = triton.cdiv(width, piece) * piece
    padded = max(16, triton.next_power_of_2(values))
    widest, wide_items = max(whole, padded), dtype == torch.float32
    lines, block = next(size for most, size in _SIZES[wide_items].items() if widest <= most)
    constants = {"ROWS": lines, "BLOCK": block, "PIECE": piece, "WIDTH": whole, "VALUES": padded}
    if widest > 256:
        return constants, {"num_warps": 8, "num_stages": 1}
    # With 2 stages no copy of a block is in flight while the block before is computed.
    return constants, {"num_warps": 8 if wide_items else 4, "num_stages": 2 if wide_items else 3}


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: int,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute causal attention of the tokens from `past` on: q [T, H, W] -> [T, H, V], in `out`.

    k [G, S, W] and v [G, S, V] may have any strides except the last, which is 1. Keys after the
    last row's token are not read. Query head h uses key head h // (H / G). With a window of n, a
    token sees itself and the n - 1 tokens before it. sinks [H]: a logit per head that takes its
    share of the softmax. Tensors are bf16 or float32; sums are float32.
    """
    (rows, heads, width), groups, values = q.shape, len(k), v.shape[2]
    assert k.stride(2) == v.stride(2) == 1
    assert past + rows <= min(k.shape[1], v.shape[1])
    out = q.new_empty(rows, heads, values) if out is None else out
    assert out.is_contiguous()
    per_group = heads // groups
    constants, how = sizes_of(q.dtype, width, values)
    attend_lines[(triton.cdiv(rows * per_group, constants["ROWS"]), groups)](
        q.contiguous(), k, v, q if sinks is None else sinks, out, past, rows, window or 0, scale,
        per_group, heads, width, values, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        **constants, SUNK=sinks is not None, EMULATE=INTERPRETED, **how, **FUSION,
    )  # fmt: skip
    return out
