"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

The cache holds one compressed vector per token for all heads. Every head's key is
[W_uk · latent, rotated key], and its value is W_uv · latent. There are two ways to compute:

    one row      W_uk is applied to the query and W_uv after the sum, so attention runs on the
                 latents themselves: nothing per token and head is expanded
    many rows    keys and values are expanded for a block of heads at a time: scratch is at most
                 SCRATCH_BYTES, or one head's S × (2·max(nope + rope, v) + nope + v) items if more

A cache in q8 gives its latents as a copy for each request: S × (kv_lora + rope) items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moeinf.models.base import Linear, Parts
from moeinf.models.config import MAX_WIDTH, Fields, require
from moeinf.models.layers.attention import attend, attend_one, head_blocks
from moeinf.models.layers.kv_cache import PassRows, Span
from moeinf.models.layers.norms import RmsNorm
from moeinf.models.layers.rope import RopeConfig, rotate_pairs


@dataclass(frozen=True)
class MlaShape:
    """Sizes by their config keys, and the softmax scale."""

    heads: int
    nope: int  # qk_nope_head_dim
    rope: int  # qk_rope_head_dim; may be 0
    value: int  # v_head_dim
    kv_lora: int  # kv_lora_rank
    q_lora: int | None  # q_lora_rank
    scale: float
    bias: bool = False  # on q_a_proj, kv_a_proj_with_mqa and o_proj
    norm_eps: float = 1e-6  # of the two inner norms; most families do not use rms_norm_eps

    def __post_init__(self) -> None:
        require(self.rope % 2 == 0, f"qk_rope_head_dim {self.rope} is odd")

    @property
    def planes(self) -> tuple[tuple[int, int], ...]:
        """The planes that a layer caches: see kv_cache.py."""
        return ((1, self.kv_lora + self.rope),)


def parse_mla(fields: Fields, heads: int, rope: RopeConfig, rotated: int | None = None) -> MlaShape:
    """Read the sizes; raise ModelDataError for invalid ones.

    A q_lora_rank of null means no bottleneck. rotated: see MlaShape.rope; None: read it.
    """
    fields.expect("q_lora_rank")
    nope = fields.integer("qk_nope_head_dim", high=MAX_WIDTH)
    if rotated is None:
        rotated = fields.integer("qk_rope_head_dim", high=MAX_WIDTH)
    return MlaShape(
        heads=heads,
        nope=nope,
        rope=rotated,
        value=fields.integer("v_head_dim", high=MAX_WIDTH),
        kv_lora=fields.integer("kv_lora_rank", high=MAX_WIDTH),
        q_lora=fields.optional_integer("q_lora_rank", high=MAX_WIDTH),
        scale=(nope + rotated) ** -0.5 * rope.softmax_factor,
        bias=fields.flag("attention_bias"),
    )


@dataclass(frozen=True)
class PositionScale:
    """Llama 4's scale of queries: 1 + beta · log(1 + floor(position / original))."""

    beta: float  # llama_4_scaling_beta
    original: int  # original_max_position_embeddings

    def __call__(self, positions: Tensor) -> Tensor:
        """Map positions [T] to factors [T] float32."""
        return 1 + self.beta * torch.log1p(torch.floor(positions.float() / self.original))


@dataclass(frozen=True)
class LowRank:
    """A projection through a bottleneck."""

    down: Linear
    norm: Callable[[Tensor], Tensor]
    up: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, in] to [T, out]."""
        return self.up(self.narrow(x))

    def narrow(self, x: Tensor) -> Tensor:
        """Map [T, in] to the normed bottleneck [T, rank]."""
        return self.norm(self.down(x))


class MlaAttention:
    """Latent attention of one layer."""

    def __init__(
        self,
        layer: int,
        shape: MlaShape,
        hidden: int,
        parts: Parts,
        prefix: str,
        scaling: PositionScale | None = None,
    ) -> None:
        self.q, self.scaling = _query(shape, hidden, parts, prefix), scaling
        self.kv_a = parts.linear(
            f"{prefix}.kv_a_proj_with_mqa", shape.kv_lora + shape.rope, hidden, shape.bias
        )
        weight = parts.tensor(f"{prefix}.kv_a_layernorm.weight", shape.kv_lora)
        rows = shape.heads * (shape.nope + shape.value)
        kv_b = parts.tensor(f"{prefix}.kv_b_proj.weight", rows, shape.kv_lora)
        kv_b = kv_b.view(shape.heads, -1, shape.kv_lora)
        self.torch_core = MlaCore(layer, shape, RmsNorm(weight, shape.norm_eps), kv_b)
        self.core = parts.tuned(self.torch_core)
        self.o = parts.linear(f"{prefix}.o_proj", hidden, shape.heads * shape.value, shape.bias)

    def __call__(self, x: Tensor, rows: PassRows) -> Tensor:
        """Map x [T, D] to [T, D]; write each request's latents into its cache."""
        q = self.q(x)
        if self.scaling is not None:
            q = q * self.scaling(rows.positions)[:, None].to(q.dtype)
        return self.o(self.core(q, self.kv_a(x), rows))


@dataclass(frozen=True)
class MlaCore:
    """The steps between the projections: rope on interleaved pairs, cache, attention."""

    layer: int
    shape: MlaShape
    kv_norm: RmsNorm
    kv_b: Tensor  # [H, nope + v, kv_lora]
    attend: Callable[..., Tensor] = attend  # or its equivalent on a device
    equal_widths: bool = True  # True if attend needs keys and values of one width

    def __call__(self, q: Tensor, latent: Tensor, rows: PassRows) -> Tensor:
        """Map q [T, H·(nope + rope)] and latent [T, kv_lora + rope] to [T, H·v]; fill the caches.

        Rows outside the spans of `rows` are left uninitialised.
        """
        shape = self.shape
        q_nope, q_rope, new = self.heads(q, latent, rows)
        past = [
            span.cache.values(stored[0], shape.kv_lora + shape.rope)
            for span in rows.spans
            for (stored,) in [span.cache.write(self.layer, span.past, new[span.rows])]
        ]  # per request [S, kv_lora + rope]
        out = q.new_empty(len(q), shape.heads, shape.value)
        singles = [i for i, span in enumerate(rows.spans) if span.count == 1]
        if singles:
            at = as_index([rows.spans[i].rows.start for i in singles])
            out[at] = self.absorbed(q_nope[at], q_rope[at], (past[i] for i in singles))
        for span, memory in zip(rows.spans, past, strict=True):
            if span.count > 1:
                self._expanded(q_nope, q_rope, span, memory, out)
        return out.flatten(1)

    def heads(self, q: Tensor, latent: Tensor, rows: PassRows) -> tuple[Tensor, Tensor, Tensor]:
        """Return q_nope [T, H, nope], q_rope [T, H, rope] and cache rows [T, 1, kv_lora + rope]."""
        shape = self.shape
        q = torch.unflatten(q, -1, (shape.heads, -1))  # [T, H, nope + rope]
        q_nope, q_rope = torch.split(q, [shape.nope, shape.rope], -1)
        q_rope = rotate_pairs(q_rope, rows.cos, rows.sin)
        latent, k_rope = torch.split(latent, [shape.kv_lora, shape.rope], -1)
        k_rope = rotate_pairs(k_rope[:, None], rows.cos, rows.sin)  # [T, 1, rope]
        return q_nope, q_rope, torch.cat((self.kv_norm(latent)[:, None], k_rope), -1)

    def absorb(self, q_nope: Tensor, q_rope: Tensor) -> Tensor:
        """Return queries on the latents themselves: [R, H, kv_lora + rope]."""
        w_uk = self.kv_b[:, : self.shape.nope]  # [H, nope, kv_lora]
        return torch.cat(((q_nope.transpose(0, 1) @ w_uk).transpose(0, 1), q_rope), -1)

    def release(self, mixed: Tensor) -> Tensor:
        """Map sums of latents [R, H, kv_lora] to sums of values [R, H, v]."""
        w_uv = self.kv_b[:, self.shape.nope :]  # [H, v, kv_lora]
        return (mixed.transpose(0, 1) @ w_uv.mT).transpose(0, 1)

    def absorbed(self, q_nope: Tensor, q_rope: Tensor, past: Iterable[Tensor]) -> Tensor:
        """Attend with each of R rows to tokens of its own; return [R, H, v].

        q_nope [R, H, nope], q_rope [R, H, rope]; past [S, kv_lora + rope] per row.
        """
        shape = self.shape
        q = self.absorb(q_nope, q_rope)
        mixed = q.new_empty(len(q), shape.heads, shape.kv_lora)  # [R, H, kv_lora]
        for row, memory in enumerate(past):
            shared = memory[None]  # [1, S, kv_lora + rope]: one key head for all query heads
            values = shared[..., : shape.kv_lora]
            for block in head_blocks(shape.heads, len(memory) * 8):
                mixed[row, block] = attend_one(q[row, block][None], shared, values, shape.scale)[0]
        return self.release(mixed)

    def _expanded(
        self, q_nope: Tensor, q_rope: Tensor, span: Span, memory: Tensor, out: Tensor
    ) -> None:
        """Attend with several rows of one request; write into out [T, H, v].

        memory is [S, kv_lora + rope].
        """
        shape, total = self.shape, len(memory)
        latent, k_rope = torch.split(memory, [shape.kv_lora, shape.rope], -1)
        width, copied = shape.nope + shape.rope, 1
        if self.equal_widths:  # torch's flash kernel needs it: zeros pad the shorter
            width, copied = max(width, shape.value), 2
        items = total * (copied * width + shape.nope + shape.value)
        for block in head_blocks(shape.heads, items * memory.itemsize):
            heads = block.stop - block.start
            kv = functional.linear(latent, self.kv_b[block].flatten(0, 1))  # [S, h·(nope + v)]
            kv = torch.unflatten(kv, -1, (heads, -1))
            k_nope, value = torch.split(kv, [shape.nope, shape.value], -1)  # [S, h, …]
            k = memory.new_zeros(heads, total, width)
            k[..., : shape.nope] = k_nope.transpose(0, 1)
            k[..., shape.nope : shape.nope + shape.rope] = k_rope
            v = value.transpose(0, 1)
            if self.equal_widths:
                v = memory.new_zeros(heads, total, width)
                v[..., : shape.value] = value.transpose(0, 1)
            q = torch.cat((q_nope[span.rows, block], q_rope[span.rows, block]), -1)
            q = functional.pad(q, (0, width - q.shape[-1]))  # [T, h, width]
            done = torch.unflatten(self.attend(q, k, v, shape.scale), -1, (heads, -1))
            out[span.rows, block] = done[..., : shape.value]


def as_index(places: list[int]) -> slice | list[int]:
    """Return consecutive places as a slice, because a list index is copied to the rows' device."""
    first, last = places[0], places[-1]
    return slice(first, last + 1) if last - first + 1 == len(places) else places


def _query(shape: MlaShape, hidden: int, parts: Parts, prefix: str) -> Callable[[Tensor], Tensor]:
    """Return the query projection [T, D] -> [T, H·W], with a bottleneck if the model has one."""
    wide = shape.heads * (shape.nope + shape.rope)
    if shape.q_lora is None:
        return parts.linear(f"{prefix}.q_proj", wide, hidden)
    down: Linear = parts.linear(f"{prefix}.q_a_proj", shape.q_lora, hidden, shape.bias)
    norm = RmsNorm(parts.tensor(f"{prefix}.q_a_layernorm.weight", shape.q_lora), shape.norm_eps)
    up: Linear = parts.linear(f"{prefix}.q_b_proj", wide, shape.q_lora)
    return parts.tuned(LowRank(down, norm, up))
