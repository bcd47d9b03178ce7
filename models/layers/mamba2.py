"""Mamba2 (arXiv 2405.21060): a layer whose memory is one matrix per head, which only decays.

Math as in transformers 5.23, modeling_granitemoehybrid.py, in float32 between the products.

A head's memory S [P, N] takes an input x [P] along a direction B [N], and is read along C [N]. The
heads of a group share B and C. With a step dt > 0 and a rate A < 0 of its own, a head computes

    S ← exp(dt · A) · S + (dt · x) ⊗ B;   its output is S C + D · x
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from moeinf.models.base import Linear, Parts
from moeinf.models.config import Fields, require
from moeinf.models.layers.kv_cache import PassRows
from moeinf.models.layers.recurrent import CHUNK, RecurrentLayout, RecurrentMemory

MAX_KERNEL = 64
_ENDLESS = (float("inf"), 1e308, {"__float__": "Infinity"})  # in published and in saved configs


@dataclass(frozen=True)
class MambaShape:
    """Sizes and variations of a Mamba2 layer."""

    heads: int
    head_dim: int  # P
    groups: int  # of heads, which share B and C
    state: int  # N
    kernel: int  # tokens that the convolution before the memory sees
    conv_bias: bool
    bias: bool  # on both projections

    def __post_init__(self) -> None:
        require(
            self.heads % self.groups == 0,
            f"{self.heads} Mamba heads do not form {self.groups} groups",
        )

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """The width of the convolution: x, B and C side by side."""
        return self.inner + 2 * self.groups * self.state

    def memory(self, layers: int) -> RecurrentLayout | None:
        """Return the layout: the convolution's last inputs [kernel - 1, C] and S [H, P, N]."""
        matrix = (self.heads, self.head_dim, self.state)
        shapes = ((self.kernel - 1, self.channels), matrix)
        return RecurrentLayout(layers, shapes) if layers else None


def refuse_limits(fields: Fields) -> None:
    """Refuse limits of dt that limit something: transformers applies them to prompts only."""
    fields.refuse(
        "time_step_limit", *(kind((0.0, end)) for kind in (list, tuple) for end in _ENDLESS)
    )


class Mamba2:
    """One layer of Mamba2, the `layer`-th of the recurrent layers."""

    def __init__(
        self, layer: int, shape: MambaShape, hidden: int, eps: float, parts: Parts, prefix: str
    ) -> None:
        inner, heads = shape.inner, shape.heads
        width = inner + shape.channels + heads
        self._layer, self._shape, self._eps = layer, shape, eps
        self._in: Linear = parts.linear(f"{prefix}.in_proj", width, hidden, shape.bias)
        self._out: Linear = parts.linear(f"{prefix}.out_proj", hidden, inner, shape.bias)
        conv = parts.tensor(f"{prefix}.conv1d.weight", shape.channels, 1, shape.kernel)
        self._conv = conv[:, 0].T.float().contiguous()  # [kernel, C]
        self._conv_bias: Tensor | None = None
        if shape.conv_bias:
            self._conv_bias = parts.tensor(f"{prefix}.conv1d.bias", shape.channels).float()
        self._dt_bias = parts.tensor(f"{prefix}.dt_bias", heads).float()
        self._rate = -parts.tensor(f"{prefix}.A_log", heads).float().exp()
        self._skip = parts.tensor(f"{prefix}.D", heads).float()
        self._norm = parts.tensor(f"{prefix}.norm.weight", inner)

    def __call__(self, x: Tensor, rows: PassRows) -> Tensor:
        """Map x [T, D] to [T, D]; write each request's next memory."""
        shape = self._shape
        widths = [shape.inner, shape.channels, shape.heads]
        z, mixed, dt = torch.split(self._in(x), widths, -1)  # [T, H·P], [T, C], [T, H]
        out = torch.empty_like(z)
        for span in rows.spans:  # torch may give a row other bits in another number of rows
            memory, r = span.cache.recurrent, span.rows
            assert memory is not None
            step = functional.softplus(dt[r].float() + self._dt_bias)
            values = torch.empty_like(z[r], dtype=torch.float32)
            run = partial(self._run, memory, span.past, mixed[r], step, values)
            memory.run(span.past, run)
            out[r] = self._gated(values, z[r]).to(x.dtype)
        return self._out(out)

    def _run(
        self, memory: RecurrentMemory, past: int, mixed: Tensor, step: Tensor, out: Tensor
    ) -> None:
        """Run one request's n rows, CHUNK tokens at a time; write into out [n, H·P]."""
        shape = self._shape
        recent, s = memory.read(self._layer, past)
        later_recent, later_s = memory.next(self._layer)
        for start in range(0, len(mixed), CHUNK):
            if memory.is_mark(past + start):
                memory.mark(self._layer, (recent, s))
            r = slice(start, min(start + CHUNK, len(mixed)))
            n = r.stop - r.start
            inputs = torch.cat((recent, mixed[r].float()))  # [kernel - 1 + n, C]
            found = inputs[:n] * self._conv[0]
            for back in range(1, shape.kernel):
                found += inputs[back : back + n] * self._conv[back]
            if self._conv_bias is not None:
                found += self._conv_bias
            seen = functional.silu(found.to(mixed.dtype)).float()
            groups = shape.groups * shape.state
            x, b, c = torch.split(seen, [shape.inner, groups, groups], -1)
            x = torch.unflatten(x, -1, (shape.heads, -1))  # [n, H, P]
            b, c = (torch.unflatten(y, -1, (shape.groups, -1)) for y in (b, c))  # [n, G, N]
            values, s = state_space(x, b, c, step[r] * self._rate, step[r], s, later_s)
            out[r] = (values + x * self._skip[:, None]).flatten(1)
            recent = inputs[-(shape.kernel - 1) :]
        later_recent.copy_(recent)

    def _gated(self, values: Tensor, z: Tensor) -> Tensor:
        """Return values [T, H·P] times silu(z), then the RMSNorm of each group."""
        wide = torch.unflatten(values * functional.silu(z.float()), -1, (self._shape.groups, -1))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return self._norm * wide.flatten(1)


def state_space(
    x: Tensor, b: Tensor, c: Tensor, decay: Tensor, step: Tensor, s: Tensor, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply n tokens in order and return (S C for each [n, H, P], S after them), all float32.

    x [n, H, P], b and c [n, G, N], decay = dt · A and step = dt [n, H]; s is S before them
    [H, P, N]. S after them is written into `out`, which may be `s` itself, and returned.

    Several tokens are computed at once (section 6 of the paper). With G_i the decay up to token i,

        S_i C_i = exp(G_i) S C_i + Σ_{j≤i} exp(G_i - G_j) (C_i · B_j) dt_j x_j
    """
    groups, (heads, width, _) = b.shape[1], s.shape
    fed = x * step[..., None]  # [n, H, P]
    if len(x) == 1:
        torch.mul(s, decay[0].exp()[:, None, None], out=out)
        grouped = out.view(groups, -1, out.shape[-1])  # [G, H/G · P, N]
        grouped.baddbmm_(fed.view(groups, -1, 1), b[0, :, None])
        return (grouped @ c[0, :, :, None]).view(1, heads, width), out
    b, c, fed = (y.transpose(0, 1) for y in (b, c, fed))  # [G, n, N], [G, n, N], [H, n, P]
    n = fed.shape[1]
    total = decay.T.cumsum(-1)[..., None]  # [H, n, 1]
    between = (total - total.mT).tril()  # before exp: above the diagonal it would overflow
    between = between.exp().tril()  # [H, n, n]
    shares = (torch.unflatten(between, 0, (groups, -1)) * (c @ b.mT)[:, None]).flatten(0, 1)
    kept = c @ s.view(groups, -1, s.shape[-1]).mT  # [G, n, H/G · P]
    kept = torch.unflatten(kept, -1, (-1, width)).transpose(1, 2).flatten(0, 1)  # [H, n, P]
    result = total.exp() * kept + shares @ fed
    left = fed * (total[:, -1:] - total).exp()  # how much of each input is left at the end
    torch.mul(s, total[:, -1:].exp(), out=out)
    left = left.mT.reshape(groups, -1, n)  # [G, H/G · P, n]
    out.view(groups, -1, out.shape[-1]).baddbmm_(left, b)
    return result.transpose(0, 1), out
