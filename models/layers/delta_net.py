"""Gated DeltaNet (arXiv 2412.06464): attention whose memory is one matrix per head.

Math as in transformers 5.23, modeling_qwen3_5_moe.py.

A head's memory S [dk, dv] maps keys to values. A token has key k, value v, log-decay g ≤ 0 and
rate β. It decays S, then corrects the value that S gives for k:

    S ← exp(g) · S;   S ← S + k ⊗ β (v - kᵀ S);   its output is qᵀ S
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from moeinf.models.base import Linear, Parts
from moeinf.models.config import MAX_HEADS, MAX_WIDTH, Fields, require
from moeinf.models.layers.kv_cache import PassRows, Span
from moeinf.models.layers.recurrent import CHUNK, RecurrentLayout, RecurrentMemory

MAX_KERNEL = 64


@dataclass(frozen=True)
class DeltaShape:
    """Sizes, by their config keys linear_*."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # tokens that the convolution before the memory sees

    def __post_init__(self) -> None:
        require(
            self.value_heads % self.key_heads == 0,
            f"{self.value_heads} value heads cannot share {self.key_heads} key heads",
        )

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The width of the convolution: queries, keys and values side by side."""
        return 2 * self.keys + self.values

    def memory(self, layers: int) -> RecurrentLayout:
        """Return the layout: the convolution's last inputs [kernel - 1, C] and S [H, dk, dv]."""
        matrix = (self.value_heads, self.key_dim, self.value_dim)
        return RecurrentLayout(layers, ((self.kernel - 1, self.channels), matrix))


def parse_delta(fields: Fields) -> DeltaShape:
    """Read the sizes, with transformers' defaults; raise ModelDataError for invalid ones."""
    return DeltaShape(
        key_heads=fields.integer("linear_num_key_heads", high=MAX_HEADS, default=16),
        value_heads=fields.integer("linear_num_value_heads", high=MAX_HEADS, default=32),
        key_dim=fields.integer("linear_key_head_dim", high=MAX_WIDTH, default=128),
        value_dim=fields.integer("linear_value_head_dim", high=MAX_WIDTH, default=128),
        kernel=fields.integer("linear_conv_kernel_dim", low=2, high=MAX_KERNEL, default=4),
    )


Inputs = Callable[[Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]


def split_inputs(shape: DeltaShape, hidden: int, parts: Parts, prefix: str) -> Inputs:
    """Return the map from x [T, D] to qkv [T, C], z [T, H·dv], a and b [T, H], by four matrices."""
    heads = shape.value_heads
    qkv: Linear = parts.linear(f"{prefix}.in_proj_qkv", shape.channels, hidden)
    z: Linear = parts.linear(f"{prefix}.in_proj_z", shape.values, hidden)
    a: Linear = parts.linear(f"{prefix}.in_proj_a", heads, hidden)
    b: Linear = parts.linear(f"{prefix}.in_proj_b", heads, hidden)
    return lambda x: (qkv(x), z(x), a(x), b(x))


def fused_inputs(shape: DeltaShape, hidden: int, parts: Parts, prefix: str) -> Inputs:
    """Return the same by two matrices, whose rows are grouped by key head (Qwen3-Next)."""
    heads, groups = shape.value_heads, shape.key_heads
    wide: Linear = parts.linear(f"{prefix}.in_proj_qkvz", shape.channels + shape.values, hidden)
    narrow: Linear = parts.linear(f"{prefix}.in_proj_ba", 2 * heads, hidden)
    values = shape.values // groups

    def inputs(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        grouped = torch.unflatten(wide(x), -1, (groups, -1))  # [T, G, …]
        widths = [shape.key_dim, shape.key_dim, values, values]
        q, k, v, z = (y.flatten(1) for y in torch.split(grouped, widths, -1))
        b, a = torch.unflatten(narrow(x), -1, (groups, -1)).chunk(2, -1)  # [T, G, H/G] each
        return torch.cat((q, k, v), -1), z, a.flatten(1), b.flatten(1)

    return inputs


Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class DeltaScan:
    """The steps between the products of a layer: its convolution and its memory."""

    def __init__(self, layer: int, shape: DeltaShape, conv: Tensor, rule: Rule) -> None:
        """Build the `layer`-th of the recurrent layers. conv: [C, 1, kernel]; rule: delta_rule."""
        self._layer, self._shape, self._rule = layer, shape, rule
        self._conv = conv[:, 0].T.float().contiguous()  # [kernel, C]

    def __call__(self, span: Span, qkv: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
        """Map one request's qkv [n, C] to [n, H·dv]; write its next memory. See rule."""
        memory = span.cache.recurrent
        assert memory is not None
        out = qkv.new_empty(len(qkv), self._shape.values)
        memory.run(span.past, partial(self._run, memory, span.past, qkv, decay, rate, out))
        return out

    def _run(
        self,
        memory: RecurrentMemory,
        past: int,
        qkv: Tensor,
        decay: Tensor,
        rate: Tensor,
        out: Tensor,
    ) -> None:
        """Run one request's n rows, CHUNK tokens at a time; write into out [n, H·dv]."""
        recent, s = memory.read(self._layer, past)
        later_recent, later_s = memory.next(self._layer)
        for start in range(0, len(qkv), CHUNK):
            if memory.is_mark(past + start):
                memory.mark(self._layer, (recent, s))
            r = slice(start, min(start + CHUNK, len(qkv)))
            inputs = torch.cat((recent, qkv[r].float()))  # [kernel - 1 + n, C]
            n = r.stop - r.start
            mixed = inputs[:n] * self._conv[0]
            for back in range(1, self._shape.kernel):
                mixed += inputs[back : back + n] * self._conv[back]
            q, k, v = self._heads(functional.silu(mixed.to(qkv.dtype)))
            values, s = self._rule(q, k, v, decay[r], rate[r], s, later_s)
            out[r] = values.flatten(1).to(out.dtype)
            recent = inputs[-(self._shape.kernel - 1) :]
        later_recent.copy_(recent)

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split mixed [n, C] into q, k [n, H, dk] of length 1 (q then over √dk), v [n, H, dv]."""
        shape = self._shape
        q, k, v = torch.split(mixed.float(), [shape.keys, shape.keys, shape.values], -1)
        q, k = (torch.unflatten(y, -1, (shape.key_heads, -1)) for y in (q, k))
        q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
        repeats = shape.value_heads // shape.key_heads
        q, k = (y.repeat_interleave(repeats, 1) for y in (q * shape.key_dim**-0.5, k))
        return q, k, torch.unflatten(v, -1, (shape.value_heads, -1))


class DeltaNet:
    """One layer of Gated DeltaNet, the `layer`-th of the recurrent layers."""

    def __init__(
        self,
        layer: int,
        shape: DeltaShape,
        hidden: int,
        eps: float,
        parts: Parts,
        prefix: str,
        inputs: Callable[[DeltaShape, int, Parts, str], Inputs] = split_inputs,
        gate: Callable[[Tensor], Tensor] = functional.silu,
    ) -> None:
        heads = shape.value_heads
        self._value_dim, self._eps, self._gate = shape.value_dim, eps, gate
        self._inputs = inputs(shape, hidden, parts, prefix)
        self._out: Linear = parts.linear(f"{prefix}.out_proj", hidden, shape.values)
        conv = parts.tensor(f"{prefix}.conv1d.weight", shape.channels, 1, shape.kernel)
        self._scan = DeltaScan(layer, shape, conv, delta_rule)
        self._dt_bias = parts.tensor(f"{prefix}.dt_bias", heads).float()
        self._rate = -parts.tensor(f"{prefix}.A_log", heads).float().exp()
        self._norm = parts.tensor(f"{prefix}.norm.weight", shape.value_dim)

    def __call__(self, x: Tensor, rows: PassRows) -> Tensor:
        """Map x [T, D] to [T, D]; write each request's next memory."""
        qkv, z, a, b = self._inputs(x)  # [T, C], [T, H·dv], [T, H], [T, H]
        out = torch.empty_like(z)
        for span in rows.spans:  # torch may give a row other bits in another number of rows
            r = span.rows
            decay = self._rate * functional.softplus(a[r].float() + self._dt_bias)  # [n, H]
            out[r] = self._gated(self._scan(span, qkv[r], decay, b[r].sigmoid().float()), z[r])
        return self._out(out)

    def _gated(self, values: Tensor, z: Tensor) -> Tensor:
        """Return the RMSNorm of each head's values [T, H·dv], times gate(z)."""
        wide = torch.unflatten(values.float(), -1, (-1, self._value_dim))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        normed = (self._norm * wide.to(self._norm.dtype)).flatten(1)
        return (normed * self._gate(z.float())).to(z.dtype)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, s: Tensor, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply n tokens in order and return (their outputs [n, H, dv], S after them), all float32.

    q, k [n, H, dk], v [n, H, dv], decay and rate [n, H]; s is S before them [H, dk, dv]. S after
    them is written into `out`, which may be `s` itself, and returned.

    The UT transform computes several tokens at once (arXiv 2406.06484, section 3.2). With G_i the
    decay up to token i, the corrections U solve a unitriangular system,

        U_i = β_i (v_i - exp(G_i) k_iᵀ S - Σ_{j<i} exp(G_i - G_j) (k_i · k_j) U_j)
    """
    if len(q) == 1:
        return one_token(q, k, v, decay[..., None], rate, s, out)
    q, k, v = (y.transpose(0, 1) for y in (q, k, v))  # [H, n, …]
    total = decay.T.cumsum(-1)[..., None]  # [H, n, 1]: G
    rate = rate.T[..., None]
    between = (total - total.mT).tril()  # before exp: above the diagonal it would overflow
    between = between.exp().tril()  # [H, n, n]: exp(G_i - G_j) for j ≤ i
    faded = total.exp()
    system = (k @ k.mT) * between * rate
    u = torch.linalg.solve_triangular(
        system, rate * (v - faded * (k @ s)), upper=False, unitriangular=True
    )
    result = faded * (q @ s) + ((q @ k.mT) * between) @ u
    left = (total[:, -1:] - total).exp()  # how far each correction has decayed at the end
    torch.mul(s, faded[:, -1:], out=out)
    out.baddbmm_((k * left).mT, u)
    return result.transpose(0, 1), out


def one_token(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, s: Tensor, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply one token as delta_rule does; decay [1, H, 1], or [1, H, dk] of each channel."""
    torch.mul(s, decay[0].exp()[..., None], out=out)
    correction = (v[0] - (k[0, :, None] @ out)[:, 0]) * rate[0][:, None]  # [H, dv]
    out.baddbmm_(k[0, :, :, None], correction[:, None])
    return (q[0, :, None] @ out)[:, 0][None], out
