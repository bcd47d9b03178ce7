"""Kimi Delta Attention (arXiv 2510.26692): a delta rule whose every key channel has its own decay.

Math as in transformers 5.23, modeling_kimi_linear.py. With a decay g [dk] of each channel,
delta_net.py's rule is

    S ← diag(exp(g)) · S;   S ← S + k ⊗ β (v - kᵀ S);   its output is qᵀ S

GLM-5.3-Flash keeps g above a bound: see LogDecay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moeinf.models.base import Linear, Parts
from moeinf.models.config import MAX_HEADS, MAX_WIDTH, Fields
from moeinf.models.layers.delta_net import MAX_KERNEL, DeltaScan, DeltaShape, one_token
from moeinf.models.layers.kv_cache import PassRows

_TOGETHER = 16  # tokens whose pairs have a decay for each channel: H · 16 · 16 · dk floats


def parse_kimi_delta(fields: Fields, default_heads: int) -> DeltaShape:
    """Read the sizes; linear_attn_config wins over keys of transformers."""
    inner = fields.section("linear_attn_config") or Fields({})

    def size(name: str, outer: str, high: int, default: int, low: int = 1) -> int:
        inner.refuse_null(name)
        default = fields.integer(outer, low=low, high=high, default=default)
        return inner.integer(name, low=low, high=high, default=default)

    heads = size("num_heads", "linear_num_heads", MAX_HEADS, default_heads)
    width = size("head_dim", "linear_head_dim", MAX_WIDTH, 128)
    kernel = size("short_conv_kernel_size", "linear_conv_kernel_dim", MAX_KERNEL, 4, low=2)
    return DeltaShape(heads, heads, width, width, kernel)


@dataclass(frozen=True)
class LogDecay:
    """How a channel's input x and its head's rate = exp(A_log) give the log-decay g."""

    bound: float | None = None  # g = bound · sigmoid(rate · x); None: g = -rate · softplus(x)
    flat: bool = False  # A_log is stored as [H], not as [1, 1, H, 1]


class KimiDelta:
    """One layer of Kimi Delta Attention, the `layer`-th of the recurrent layers."""

    def __init__(
        self,
        layer: int,
        shape: DeltaShape,
        hidden: int,
        eps: float,
        parts: Parts,
        prefix: str,
        forgetting: LogDecay = LogDecay(),
    ) -> None:
        heads, wide, narrow = shape.value_heads, shape.values, shape.value_dim

        def linear(name: str, out_features: int, in_features: int) -> Linear:
            return parts.linear(f"{prefix}.{name}", out_features, in_features)

        def conv(name: str) -> Tensor:
            return parts.tensor(f"{prefix}.{name}_conv1d.weight", wide, 1, shape.kernel)

        self._heads, self._eps = heads, eps
        self._qkv = [linear(f"{name}_proj", wide, hidden) for name in "qkv"]
        self._decay = linear("f_a_proj", narrow, hidden), linear("f_b_proj", wide, narrow)
        self._gate = linear("g_a_proj", narrow, hidden), linear("g_b_proj", wide, narrow)
        self._beta, self._out = linear("b_proj", heads, hidden), linear("o_proj", hidden, wide)
        self._scan = DeltaScan(layer, shape, torch.cat([conv(n) for n in "qkv"]), channel_rule)
        self._dt_bias = parts.tensor(f"{prefix}.dt_bias", wide).float()
        sizes = (heads,) if forgetting.flat else (1, 1, heads, 1)
        rate = parts.tensor(f"{prefix}.A_log", *sizes).float().exp()
        self._rate, self._bound = rate.view(1, heads, 1), forgetting.bound
        self._norm = parts.tensor(f"{prefix}.o_norm.weight", narrow).float()

    def __call__(self, x: Tensor, rows: PassRows) -> Tensor:
        """Map x [T, D] to [T, D]; write each request's next memory."""
        first, second = self._decay
        slow = second(first(x))  # [T, H·dk]
        first, second = self._gate
        gate, beta = second(first(x)), self._beta(x)
        qkv = torch.cat([linear(x) for linear in self._qkv], -1)
        out = torch.empty_like(gate)
        for span in rows.spans:  # torch may give a row other bits in another number of rows
            r = span.rows
            decay = self._decay_of(slow[r].float() + self._dt_bias)
            values = self._scan(span, qkv[r], decay, beta[r].sigmoid().float())
            out[r] = self._gated(values, gate[r])
        return self._out(out)

    def _decay_of(self, x: Tensor) -> Tensor:
        """Map x [n, H·dk] to log-decays [n, H, dk]; see LogDecay."""
        x = torch.unflatten(x, -1, (self._heads, -1))
        if self._bound is None:
            return -self._rate * functional.softplus(x)
        return self._bound * (self._rate * x).sigmoid()

    def _gated(self, values: Tensor, gate: Tensor) -> Tensor:
        """Return the RMSNorm of each head's values [T, H·dv] times the gate's sigmoid."""
        wide = torch.unflatten(values.float(), -1, (self._heads, -1))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return ((self._norm * wide).flatten(1) * gate.float().sigmoid()).to(values.dtype)


def channel_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, s: Tensor, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply n tokens in order, as delta_net.delta_rule does, with decay [n, H, dk].

    The system of the UT transform has Σ_c k_ic k_jc exp(G_ic - G_jc) in place of a product of keys
    times one decay. Up to 16 tokens form a system.
    """
    found = []
    for start in range(0, len(q), _TOGETHER):
        few = slice(start, start + _TOGETHER)
        rule = one_token if len(q[few]) == 1 else _few_tokens
        values, s = rule(q[few], k[few], v[few], decay[few], rate[few], s, out)
        found.append(values)
    return torch.cat(found), s


def _few_tokens(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, s: Tensor, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply n tokens by one system; see channel_rule."""
    q, k, v, decay = (y.transpose(0, 1) for y in (q, k, v, decay))  # [H, n, …]
    total = decay.cumsum(1)  # [H, n, dk]: G
    rate = rate.T[..., None]  # [H, n, 1]
    later = torch.ones(len(total[0]), len(total[0]), device=q.device).triu(1).bool()[..., None]
    # filled before exp: for j > i it would overflow
    between = (total[:, :, None] - total[:, None]).masked_fill(later, -torch.inf).exp()
    faded_k = k[:, None] * between  # [H, n, n, dk]: k_j as token i sees it
    system = (faded_k @ k[..., None])[..., 0] * rate  # [H, n, n]
    seen = (faded_k @ q[..., None])[..., 0]
    faded = total.exp()
    u = torch.linalg.solve_triangular(
        system, rate * (v - (faded * k) @ s), upper=False, unitriangular=True
    )
    result = (faded * q) @ s + seen @ u
    left = (total[:, -1:] - total).exp()  # how far each correction has decayed at the end
    torch.mul(s, faded[:, -1, :, None], out=out)
    out.baddbmm_((k * left).mT, u)
    return result.transpose(0, 1), out
