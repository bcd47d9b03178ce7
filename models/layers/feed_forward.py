"""Decoders in which some layers have experts and others a dense network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from moeinf.models.base import Experts, MoeShape, Parts
from moeinf.models.config import MAX_LAYERS, MAX_WIDTH, Fields
from moeinf.models.layers.ffn import GatedMlp, LimitedMlp, gated_mlp
from moeinf.models.layers.moe import Router, SparseFfn, parse_moe

FeedForward = Callable[[Tensor, Experts], Tensor]  # [T, D] -> [T, D]


@dataclass(frozen=True)
class DenseFfn:
    """A layer without experts: only a dense network."""

    mlp: Callable[[Tensor], Tensor]  # [T, D] -> [T, D]

    def __call__(self, x: Tensor, experts: Experts) -> Tensor:
        """Map [T, D] to [T, D]; the experts are not used."""
        return self.mlp(x)


@dataclass(frozen=True)
class FfnPlan:
    """The kinds and sizes of a decoder's feed-forward layers."""

    moe: MoeShape
    sparse_layers: Sequence[int]  # the layers that have experts, ascending
    dense_intermediate: int | None  # of the other layers; None without them


def parse_ffn(fields: Fields, sparse_layers: Sequence[int], layers: int, hidden: int) -> FfnPlan:
    """Read moe_intermediate_size and, for a model with dense layers, intermediate_size."""
    dense = None
    if len(sparse_layers) < layers:
        dense = fields.integer("intermediate_size", high=MAX_WIDTH)
    moe = parse_moe(fields, len(sparse_layers), hidden, "moe_intermediate_size")
    return FfnPlan(moe, sparse_layers, dense)


def parse_sparse_step(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return Qwen's sparse layers: every decoder_sparse_step-th, without mlp_only_layers."""
    step = fields.integer("decoder_sparse_step", high=MAX_LAYERS, default=1)
    dense = set(fields.integers("mlp_only_layers", high=MAX_LAYERS))
    return tuple(layer for layer in range(step - 1, layers, step) if layer not in dense)


def shared_experts(parts: Parts, prefix: str, moe: MoeShape, count: int) -> GatedMlp | None:
    """Return DeepSeek's `count` shared experts, stored as one wide network; None for 0."""
    if not count:
        return None
    width, kind = count * moe.intermediate, dense_kind(moe)
    return gated_mlp(parts, f"{prefix}.shared_experts", moe.hidden, width, kind)


def dense_kind(moe: MoeShape) -> type[GatedMlp]:
    """Return the dense network with the activation of the experts."""
    return LimitedMlp if moe.activation == "swiglu10" else GatedMlp


def feed_forward(
    plan: FfnPlan,
    parts: Parts,
    layer: int,
    prefix: str,
    router: Callable[[], Router],
    shared: Callable[[], Callable[[Tensor], Tensor] | None] = lambda: None,
) -> FeedForward:
    """Return layer `layer` from `prefix`.*; only a sparse layer calls router and shared."""
    if layer in plan.sparse_layers:
        return SparseFfn(plan.sparse_layers.index(layer), router(), shared())
    assert plan.dense_intermediate is not None
    width, kind = plan.dense_intermediate, dense_kind(plan.moe)
    return DenseFfn(gated_mlp(parts, prefix, plan.moe.hidden, width, kind))
