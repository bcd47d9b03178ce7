"""Causal attention: prefill, decode, and grouped-query attention as a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moeinf.models.base import Linear, Parts
from moeinf.models.config import MAX_HEADS, MAX_WIDTH, Fields, require
from moeinf.models.layers.ffn import SigmoidGate
from moeinf.models.layers.kv_cache import KvCache, PassRows, Planes
from moeinf.models.layers.rope import rotate_half, rotate_pairs

SCRATCH_BYTES = 8 << 20  # limit for one step over a block of heads, if one head fits
_WIDENED_ITEMS = 1 << 18  # keys or values held as float32 at once: 1 MiB, in a core's own cache


def head_blocks(heads: int, bytes_per_head: int) -> Iterator[slice]:
    """Yield blocks of heads that need at most SCRATCH_BYTES, or one head if it needs more."""
    step = max(1, SCRATCH_BYTES // max(1, bytes_per_head))
    for start in range(0, heads, step):
        yield slice(start, min(start + step, heads))


def causal_mask(
    new: int, total: int, window: int | None, device: torch.device | None = None
) -> Tensor:
    """Return [new, total] bool: the tokens that each of the last `new` sees, itself included."""
    at = torch.arange(total - new, total, device=device)[:, None]  # [T, 1]
    key = torch.arange(total, device=device)  # [S]
    mask = key <= at
    return mask if window is None else mask & (key > at - window)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return causal attention [T, H·V] of the last T of S tokens.

    q [T, H, W], k [G, S, W], v [G, S, V], G divides H: query head h uses key head h // (H / G).
    A window of n sees the token itself and the n - 1 before it. Keys are never expanded to H
    heads, and scores are never held for all of T × S × H at once. If W and V differ, several rows
    take a copy of keys and values in the larger width: torch's fused attention needs one width.

    sinks [H]: a logit per head that takes a share of the softmax and has no value (gpt-oss).
    """
    if window is not None:
        seen = min(k.shape[1], len(q) + window - 1)
        k, v = k[:, -seen:], v[:, -seen:]
    if len(q) == 1:
        heads = q[0].view(len(k), -1, q.shape[2])  # [G, H/G, W]
        blocks = head_blocks(len(k), heads.shape[1] * k.shape[1] * 8)
        groups = None if sinks is None else sinks.view(len(k), -1)  # [G, H/G]
        return torch.cat(
            [
                attend_one(heads[b], k[b], v[b], scale, None if groups is None else groups[b])
                for b in blocks
            ]
        ).view(1, -1)
    new, total, width = len(q), k.shape[1], v.shape[2]
    mask = None
    if sinks is not None or new != total or window is not None:
        mask = causal_mask(new, total, window, q.device)
    if width != k.shape[2]:
        q, k, v = _in_one_width(q, k, v)
    q = torch.unflatten(q, 1, (len(k), -1)).permute(1, 2, 0, 3)  # [G, H/G, T, W]
    if sinks is not None and mask is not None:  # with sinks the mask is always set
        q, k, v = _with_sink_key(q, k, v, sinks / scale)
        mask = functional.pad(mask, (1, 0), value=True)  # [T, 1 + S]
    k, v = (x[:, None].expand(-1, q.shape[1], -1, -1) for x in (k, v))  # no copies
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return out[..., :width].permute(2, 0, 1, 3).flatten(1)


def _in_one_width(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors padded with zero rows to the same number of rows."""
    most = max(tensor.shape[-1] for tensor in tensors)
    return [functional.pad(tensor, (0, most - tensor.shape[-1])) for tensor in tensors]


def _with_sink_key(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v with a key in front whose product with q is the sink and whose value is 0.

    q [G, P, T, W], k and v [G, S, W] and sinks [G·P] -> W + 1 and S + 1. torch's fused attention
    has no sinks. A mask for them would have T × S × H numbers.
    """
    extra = sinks.to(q.dtype).view(len(k), -1, 1, 1).expand(-1, -1, q.shape[2], 1)
    k, v = (functional.pad(x, (0, 1, 1, 0)) for x in (k, v))
    k[:, 0, -1] = 1
    return torch.cat((q, extra), -1), k, v


def attend_one(
    q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Return the newest token's attention: q [G, P, W], k [G, S, W], v [G, S, V] -> [G, P, V].

    It is computed in float32. sinks [G, P]: see attend. Scratch is 2 · G·P·S floats of scores and
    the widened keys.

    Matmuls are used because the CPU's scaled_dot_product_attention is slower for one row. They run
    on widened pieces of k and v because torch compiles a bfloat16 matmul again for every S.
    Measured on one core with 16 heads of 128, bfloat16, S 2048: 2.0 ms against 4.4. The first use
    of an S would cost 2.8 ms more.
    """
    total = k.shape[1]
    step = max(1, _WIDENED_ITEMS // (k.shape[0] * k.shape[2]))
    pieces = [slice(start, min(start + step, total)) for start in range(0, total, step)]
    wide = q.float() * scale
    scores = torch.cat([wide @ k[:, piece].float().mT for piece in pieces], -1)  # [G, P, S]
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        weights = torch.cat((scores, sinks.float()[..., None]), -1).softmax(-1)[..., :-1]
    out = weights[..., pieces[0]] @ v[:, pieces[0]].float()
    for piece in pieces[1:]:
        out += weights[..., piece] @ v[:, piece].float()
    return out.to(q.dtype)


@dataclass(frozen=True)
class GqaShape:
    """Sizes and variations of grouped-query attention."""

    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False  # on all four projections
    qkv_bias: bool = False  # on q, k and v only
    scale: float | None = None  # of the scores; None: head_dim^-0.5
    clip: float | None = None  # of q, k and v (olmoe's clip_qkv)
    window: int | None = None  # tokens seen, itself included
    gated: bool = False  # q_proj also makes a gate for each head's output, beside its query
    value_dim: int | None = None  # of a head's values; None: head_dim

    def __post_init__(self) -> None:
        require(
            self.heads % self.kv_heads == 0,
            f"{self.heads} heads cannot share {self.kv_heads} key-value heads",
        )
        require(self.head_dim % 2 == 0, f"a head_dim of {self.head_dim} cannot be rotated")

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def value_width(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def planes(self) -> Planes:
        """The planes that a layer caches: see kv_cache.py."""
        return (self.kv_heads, self.head_dim), (self.kv_heads, self.value_width)


def parse_gqa(
    fields: Fields, hidden: int, heads: int, default_head_dim: int | None = None
) -> GqaShape:
    """Read the sizes, with transformers' defaults; raise ModelDataError for invalid ones.

    default_head_dim: the default of the family's config class; None: hidden / heads.
    """
    fields.expect("num_key_value_heads")
    if default_head_dim is not None:
        fields.refuse_null("head_dim")
    head_dim = fields.optional_integer("head_dim", high=MAX_WIDTH)
    head_dim = default_head_dim if head_dim is None else head_dim
    if head_dim is None:
        require(hidden % heads == 0, f"hidden_size {hidden} is not a multiple of {heads} heads")
        head_dim = hidden // heads
    kv_heads = fields.integer("num_key_value_heads", high=MAX_HEADS, default=heads)
    return GqaShape(heads, kv_heads, head_dim)


@dataclass(frozen=True)
class GqaCore:
    """The steps between the projections of one layer: norms, clipping, rope, cache, attention.

    The rope is rotate_half. The norms act on the whole projection [T, heads·head_dim], before rope.
    """

    layer: int
    shape: GqaShape
    q_norm: Callable[[Tensor], Tensor] | None = None
    k_norm: Callable[[Tensor], Tensor] | None = None
    sinks: Tensor | None = None  # [H], see attend
    attend: Callable[..., Tensor] = attend  # or its equivalent on a device

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, rows: PassRows) -> Tensor:
        """Map q [T, H·W], k [T, G·W], v [T, G·V] to [T, H·V]; write k and v into the caches.

        Rows outside the spans of `rows` are left uninitialised.
        """
        shape = self.shape
        q, k, v = self.heads(q, k, v, rows)
        out = q.new_empty(len(q), shape.heads * shape.value_width)
        for span in rows.spans:
            r = span.rows
            stored = span.cache.write(self.layer, span.past, k[r], v[r])
            copied = span.count > 1 and shape.value_width != shape.head_dim  # by attend
            if span.cache.layout.form == "full" and not copied:
                given = q[r], *stored, shape.softmax_scale, shape.window, self.sinks
                out[r] = self.attend(*given)
            else:
                self._widened(q[r], stored, span.cache, out[r])
        return out

    def _widened(self, q: Tensor, stored: tuple[Tensor, ...], cache: KvCache, out: Tensor) -> None:
        """Attend over stored rows, some key heads at a time; write into out [T, H·V].

        Scratch is at most SCRATCH_BYTES for their values, or one head's if that needs more.
        """
        shape, share = self.shape, self.shape.heads // self.shape.kv_heads
        widths = shape.head_dim, shape.value_width
        seen = stored[0].shape[1]
        if shape.window is not None:
            seen = min(seen, len(q) + shape.window - 1)
        for block in head_blocks(shape.kv_heads, 2 * seen * max(widths) * q.itemsize):
            keys, values = (
                cache.values(x[block, -seen:], width)
                for x, width in zip(stored, widths, strict=True)
            )
            heads = slice(block.start * share, block.stop * share)
            sinks = None if self.sinks is None else self.sinks[heads]
            given = q[:, heads], keys, values, shape.softmax_scale, shape.window, sinks
            columns = slice(heads.start * widths[1], heads.stop * widths[1])
            out[:, columns] = self.attend(*given)

    def heads(
        self, q: Tensor, k: Tensor, v: Tensor, rows: PassRows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v after norms, clipping and rope: [T, heads, W], v [T, heads, V]."""
        shape = self.shape
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        if shape.clip is not None:
            q, k, v = (y.clamp(-shape.clip, shape.clip) for y in (q, k, v))
        q, k = (torch.unflatten(y, -1, (-1, shape.head_dim)) for y in (q, k))
        v = torch.unflatten(v, -1, (-1, shape.value_width))
        return self.turned(q, rows), self.turned(k, rows), v

    def turned(self, y: Tensor, rows: PassRows) -> Tensor:
        """Rotate y [T, heads, W]. GPU kernels replace this class only, no subclass."""
        return rotate_half(y, rows.cos, rows.sin)


class NoRopeCore(GqaCore):
    """A core without rope: the order of tokens is known from causality alone (NoPE)."""

    def turned(self, y: Tensor, rows: PassRows) -> Tensor:
        """Return y."""
        return y


class InterleavedRopeCore(GqaCore):
    """A core whose rope pairs neighbours, 2i with 2i + 1."""

    def turned(self, y: Tensor, rows: PassRows) -> Tensor:
        """Rotate y [T, heads, W]."""
        return rotate_pairs(y, rows.cos, rows.sin)


class NormAfterRopeCore(GqaCore):
    """A core whose norms act on heads after rope."""

    def heads(
        self, q: Tensor, k: Tensor, v: Tensor, rows: PassRows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See GqaCore."""
        assert self.q_norm is not None
        assert self.k_norm is not None
        plain = GqaCore(self.layer, self.shape)
        q, k, v = plain.heads(q, k, v, rows)
        q, k = self.q_norm(q.flatten(1)), self.k_norm(k.flatten(1))
        return q.view(len(q), -1, v.shape[-1]), k.view(v.shape), v


@dataclass(frozen=True)
class Projections:
    """q, k, v and o of one layer, and `Parts.tuned` for the steps between them."""

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    tuned: Callable[[Any], Any]


class GqaAttention:
    """Grouped-query attention of one layer."""

    def __init__(
        self,
        layer: int,
        shape: GqaShape,
        projections: Projections,
        q_norm: Callable[[Tensor], Tensor] | None = None,
        k_norm: Callable[[Tensor], Tensor] | None = None,
        sinks: Tensor | None = None,
        core: type[GqaCore] = GqaCore,
    ) -> None:
        """Build layer `layer`; for the norms and sinks see GqaCore."""
        self.projections, self.shape = projections, shape
        self.core: GqaCore = projections.tuned(core(layer, shape, q_norm, k_norm, sinks))
        self.gate: SigmoidGate | None = projections.tuned(SigmoidGate()) if shape.gated else None

    def __call__(self, x: Tensor, rows: PassRows) -> Tensor:
        """Map x [T, D] to [T, D]; write each request's keys and values into its cache."""
        p, q = self.projections, self.projections.q(x)
        if self.gate is None:
            return p.o(self.core(q, p.k(x), p.v(x), rows))
        heads = torch.unflatten(q, -1, (self.shape.heads, -1))  # [T, H, 2W]
        q, gate = (y.flatten(1) for y in heads.chunk(2, -1))  # [T, H·W] each
        return p.o(self.gate(self.core(q, p.k(x), p.v(x), rows), gate))


def gqa_projections(parts: Parts, prefix: str, hidden: int, shape: GqaShape) -> Projections:
    """Return the projections `prefix`.{q,k,v,o}_proj."""
    wide = shape.heads * shape.head_dim
    bias = shape.bias or shape.qkv_bias
    return Projections(
        parts.linear(f"{prefix}.q_proj", 2 * wide if shape.gated else wide, hidden, bias),
        parts.linear(f"{prefix}.k_proj", shape.kv_heads * shape.head_dim, hidden, bias),
        parts.linear(f"{prefix}.v_proj", shape.kv_heads * shape.value_width, hidden, bias),
        parts.linear(f"{prefix}.o_proj", hidden, shape.heads * shape.value_width, shape.bias),
        parts.tuned,
    )
