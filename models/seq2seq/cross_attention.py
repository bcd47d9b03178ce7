"""The three attentions of an encoder-decoder: within the source, within the answer, and across.

Heads are never shared; there is no rope.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moeinf.models.base import Linear
from moeinf.models.layers.attention import head_blocks
from moeinf.models.layers.kv_cache import Span

Planes = tuple[Tensor, Tensor]  # keys and values of a source of S tokens, [H, S, W] each
Memory = tuple[Planes, ...]  # one per decoder layer


@dataclass(frozen=True)
class Heads:
    """q, k, v and o of one attention over `count` heads; scores are multiplied with `scale`."""

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    count: int
    scale: float

    def split(self, x: Tensor) -> Tensor:
        """Map [T, H·W] to [T, H, W]."""
        return torch.unflatten(x, -1, (self.count, -1))


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None, causal: bool
) -> Tensor:
    """Return the attention [T, H·W] of q [T, H, W] over k and v [H, S, W].

    bias [H, T, S] is added to the scores. causal: the T rows are the last of the S, and a row sees
    no later ones. One row is computed in float32 by matmuls: see attention.attend_one.
    """
    new, total = len(q), k.shape[1]
    q = q.transpose(0, 1)  # [H, T, W]
    if new == 1:
        scores = (q.float() * scale) @ k.float().mT  # [H, 1, S]
        if bias is not None:
            scores += bias
        return (scores.softmax(-1) @ v.float()).to(q.dtype).transpose(0, 1).flatten(1)
    unseen = None
    if causal:
        unseen = torch.ones(new, total, dtype=torch.bool, device=q.device).triu(total - new + 1)
    out = torch.empty_like(q)
    for heads in head_blocks(len(q), new * total * 4):
        mask = None if bias is None else bias[heads].to(q.dtype)
        if unseen is not None:
            hidden = q.new_zeros(()) if mask is None else mask
            mask = torch.where(unseen, -torch.inf, hidden)
        out[heads] = functional.scaled_dot_product_attention(
            q[heads], k[heads], v[heads], attn_mask=mask, scale=scale
        )
    return out.transpose(0, 1).flatten(1)


@dataclass(frozen=True)
class SourceAttention:
    """Every token of one source attends to all of it."""

    heads: Heads

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Map [T, D] to [T, D]."""
        h = self.heads
        k, v = (h.split(part(x)).transpose(0, 1) for part in (h.k, h.v))
        return h.o(attend(h.split(h.q(x)), k, v, h.scale, bias, causal=False))


@dataclass(frozen=True)
class SelfAttention:
    """Every new token attends to itself and to those of its request before it."""

    layer: int
    heads: Heads

    def __call__(self, x: Tensor, spans: Sequence[Span], biases: Sequence[Tensor | None]) -> Tensor:
        """Map [T, D] to [T, D] with one bias per span; write keys and values into the caches."""
        h = self.heads
        q, k, v = (h.split(part(x)) for part in (h.q, h.k, h.v))
        out = q.new_empty(len(x), q[0].numel())
        for span, bias in zip(spans, biases, strict=True):
            r = span.rows
            keys, values = span.cache.write(self.layer, span.past, k[r], v[r])
            out[r] = attend(q[r], keys, values, h.scale, bias, causal=True)
        return h.o(out)


@dataclass(frozen=True)
class MemoryAttention:
    """Every new token attends to the source of its request."""

    heads: Heads

    def read(self, x: Tensor) -> Planes:
        """Map the encoder's output [S, D] to this layer's keys and values [H, S, W]."""
        h = self.heads
        keys, values = (h.split(part(x)).transpose(0, 1).contiguous() for part in (h.k, h.v))
        return keys, values

    def __call__(self, x: Tensor, sequences: Sequence[slice], planes: Sequence[Planes]) -> Tensor:
        """Map [T, D] to [T, D]; the rows of each sequence see the planes of its source."""
        h = self.heads
        q = h.split(h.q(x))
        out = q.new_empty(len(x), q[0].numel())
        for rows, (keys, values) in zip(sequences, planes, strict=True):
            out[rows] = attend(q[rows], keys, values, h.scale, None, causal=False)
        return h.o(out)
