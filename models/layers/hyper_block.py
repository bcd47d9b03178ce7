"""Hyper-connections: several residual streams per token, which each half of a block mixes.

mHC (Xie et al., 2026; DeepSeek-V4, section 2.2). Before a half, the N streams of a token give three
sets of weights, by one projection of all of them:

    pre [N]       collapse the streams into the input of the half
    post [N]      add its output to every stream
    comb [N, N]   mix the streams; its rows and columns sum to 1 (Sinkhorn-Knopp)

    streams [T, N, D] ─ pre ─→ x [T, D] ─→ norm, attention or experts ─→ y [T, D]
    streams          ─ comb ─→ mixed [T, N, D] ── + post · y ──→ streams [T, N, D]

Math as in transformers 5.23, modeling_deepseek_v4.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from moeinf.models.base import Experts, Parts
from moeinf.models.config import Fields
from moeinf.models.layers.kv_cache import PassRows, Piece, Span
from moeinf.models.layers.moe import SparseFfn

_MOST_STREAMS = 64
_MOST_ITERATIONS = 1000


@dataclass(frozen=True)
class HyperShape:
    """Sizes by their config keys, and the eps of the norm before the projection."""

    streams: int  # hc_mult
    iterations: int  # hc_sinkhorn_iters
    eps: float  # hc_eps
    norm_eps: float


def parse_hyper(fields: Fields, norm_eps: float) -> HyperShape:
    """Read the sizes; raise ModelDataError for invalid ones."""
    return HyperShape(
        streams=fields.integer("hc_mult", high=_MOST_STREAMS, default=4),
        iterations=fields.integer("hc_sinkhorn_iters", high=_MOST_ITERATIONS, default=20),
        eps=fields.number("hc_eps", low=0.0, high=1.0, default=1e-6),
        norm_eps=norm_eps,
    )


class Mix(NamedTuple):
    """The weights of one half for the rows of a pass, in the dtype of the streams."""

    post: Tensor  # [T, N]
    comb: Tensor  # [T, N, N]


@dataclass(frozen=True)
class HyperConnection:
    """The weights around one half of a block. All three tensors are in float32.

    fn [(2 + N)·N, N·D], base [(2 + N)·N], scale [3]: of pre, post and comb, in this order.
    """

    shape: HyperShape
    fn: Tensor
    base: Tensor
    scale: Tensor

    def over(self, x: Tensor, spans: Sequence[Span]) -> tuple[Tensor, Mix]:
        """Map streams [T, N, D] of several requests, each with the bits that it has alone."""
        if len(spans) == 1:
            return self(x)
        inputs, mixes = zip(*(self(x[span.rows]) for span in spans), strict=True)
        post, comb = zip(*mixes, strict=True)
        return torch.cat(inputs), Mix(torch.cat(post), torch.cat(comb))

    def __call__(self, x: Tensor) -> tuple[Tensor, Mix]:
        """Map streams [T, N, D] to the input of the half [T, D] and the weights of its output."""
        count, eps = self.shape.streams, self.shape.eps
        sizes = [count, count, count * count]
        found = torch.split(_projected(x, self.fn, self.shape.norm_eps), sizes, -1)
        bases, scales = torch.split(self.base.float(), sizes), self.scale.float()
        pre, post, comb = (w * s + b for w, s, b in zip(found, scales, bases, strict=True))
        comb = torch.unflatten(comb, -1, (count, count)).softmax(-1) + eps
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
        for _ in range(self.shape.iterations - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + eps)
            comb = comb / (comb.sum(-2, keepdim=True) + eps)
        mix = Mix((2 * post.sigmoid()).to(x.dtype), comb.to(x.dtype))
        return _collapsed(x, pre.sigmoid() + eps), mix


@dataclass(frozen=True)
class HyperHead:
    """DeepSeek-V4's collapse of the streams before the final norm."""

    shape: HyperShape
    fn: Tensor  # [N, N·D]
    base: Tensor  # [N]
    scale: Tensor  # [1]

    def __call__(self, x: Tensor) -> Tensor:
        """Map streams [T, N, D] to [T, D]."""
        eps = self.shape.norm_eps
        found = torch.cat([_projected(row[None], self.fn, eps) for row in x])  # as if alone
        weights = (found * self.scale.float() + self.base.float()).sigmoid() + self.shape.eps
        return _collapsed(x, weights)


def mean_head(x: Tensor) -> Tensor:
    """Map streams [T, N, D] to their mean [T, D]: the collapse of GLM-5.3-Flash."""
    return x.mean(1)


def _projected(x: Tensor, fn: Tensor, eps: float) -> Tensor:
    """Return fn · norm(streams of a row) in float32: [T, N, D] -> [T, rows of fn]."""
    wide = x.flatten(1).float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return functional.linear(wide, fn.float())


def _collapsed(x: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of streams x [T, N, D] by weights [T, N] float32."""
    return (weights[..., None] * x).sum(1).to(x.dtype)


def hyper_connection(parts: Parts, prefix: str, shape: HyperShape, hidden: int) -> HyperConnection:
    """Return the weights of one half: `prefix`.fn, .base and .scale."""
    count = shape.streams
    wide = (2 + count) * count
    return HyperConnection(
        shape,
        parts.tensor(f"{prefix}.fn", wide, count * hidden),
        parts.tensor(f"{prefix}.base", wide),
        parts.tensor(f"{prefix}.scale", 3),
    )


def hyper_head(parts: Parts, prefix: str, shape: HyperShape, hidden: int) -> HyperHead:
    """Return the collapse of `prefix`.hc_fn, .hc_base and .hc_scale."""
    count = shape.streams
    return HyperHead(
        shape,
        parts.tensor(f"{prefix}.hc_fn", count, count * hidden),
        parts.tensor(f"{prefix}.hc_base", count),
        parts.tensor(f"{prefix}.hc_scale", 1),
    )


@dataclass(frozen=True)
class HyperBlock:
    """Attention, then a feed-forward layer, each between the weights of its hyper-connection."""

    attention_mix: HyperConnection
    attention_norm: Callable[[Tensor], Tensor]
    attention: Callable[[Tensor, PassRows], Tensor]
    ffn_mix: HyperConnection
    ffn_norm: Callable[[Tensor], Tensor]
    ffn: Callable[[Tensor, Experts], Tensor]

    def __call__(self, x: Tensor, rows: PassRows, experts: Experts) -> Tensor:
        """Map streams [T, N, D] to [T, N, D]."""
        x = self._attended(x, rows)
        one, mix = self.ffn_mix.over(x, rows.spans)
        change = self._fed(self.ffn_norm(one), rows.ids, experts)
        return expanded(x, mix, change, rows.spans)

    def over(self, x: Tensor, pieces: Sequence[Piece], experts: Experts) -> Tensor:
        """Map x [T, N, D], which is overwritten, to [T, N, D]: each piece as if it were a pass."""
        if not isinstance(self.ffn, SparseFfn):
            for at, rows in pieces:
                x[at] = self(x[at], rows, experts)
            return x
        normed, mixes = [], []
        for at, rows in pieces:
            x[at] = self._attended(x[at], rows)
            one, mix = self.ffn_mix(x[at])  # a piece is of one request
            normed.append(self.ffn_norm(one))
            mixes.append(mix)
        cuts, ids = [at for at, _ in pieces], [rows.ids for _, rows in pieces]
        change = self.ffn.over(torch.cat(normed), cuts, experts, torch.cat(ids))
        for at, mix in zip(cuts, mixes, strict=True):
            x[at] = expanded(x[at], mix, change[at])
        return x

    def _attended(self, x: Tensor, rows: PassRows) -> Tensor:
        one, mix = self.attention_mix.over(x, rows.spans)
        return expanded(x, mix, self.attention(self.attention_norm(one), rows), rows.spans)

    def _fed(self, x: Tensor, ids: Tensor, experts: Experts) -> Tensor:
        if isinstance(self.ffn, SparseFfn):
            return self.ffn(x, experts, ids)
        return self.ffn(x, experts)


def expanded(x: Tensor, mix: Mix, change: Tensor, spans: Sequence[Span] = ()) -> Tensor:
    """Return the streams [T, N, D] after a half whose output is change [T, D].

    With several spans each gets the bits that it has alone.
    """
    mixing = mix.comb.mT
    if len(spans) <= 1:
        mixed = mixing @ x
    else:
        mixed = torch.cat([mixing[span.rows] @ x[span.rows] for span in spans])
    return mix.post[..., None] * change[:, None] + mixed
