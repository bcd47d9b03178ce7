"""The experts of DeepSeek-V3 and the GLM families, chosen by sigmoid scores.

Checkpoints of these families have layers for multi-token prediction after the last one: mtp.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from moeinf.models.base import ExpertPart, Parts
from moeinf.models.config import MAX_EXPERTS, MAX_LAYERS, Fields, require
from moeinf.models.expert_names import MLP_EXPERTS, is_layer
from moeinf.models.layers.decoder import BodyConfig, HasBody, ignores_buffers
from moeinf.models.layers.feed_forward import (
    FeedForward,
    FfnPlan,
    feed_forward,
    parse_ffn,
    shared_experts,
)
from moeinf.models.layers.ffn import GatedMlp
from moeinf.models.layers.routing import SigmoidRouter, require_groups


@dataclass(frozen=True)
class SigmoidExperts:
    """The feed-forward part of a config, checked."""

    plan: FfnPlan
    shared_experts: int
    groups: tuple[int, int] | None  # n_group, topk_group
    renormalise: bool  # norm_topk_prob
    scale: float  # routed_scaling_factor
    extra_layers: range  # of multi-token prediction

    def __post_init__(self) -> None:
        if self.groups is not None:
            experts = self.plan.moe.experts
            require_groups(*self.groups, experts, self.plan.moe.top_k)
            require(experts // self.groups[0] >= 2, "a group of experts has fewer than two")


class HasSigmoidExperts(HasBody, Protocol):
    """The config of a family that chooses experts by sigmoid scores."""

    @property
    def ffn(self) -> SigmoidExperts: ...


def parse_sigmoid_experts(
    fields: Fields,
    body: BodyConfig,
    sparse_layers: Sequence[int],
    default_scale: float,
    default_groups: tuple[int, int] = (1, 1),
    default_renormalise: bool = True,
) -> SigmoidExperts:
    """Read the feed-forward part; raise ModelDataError for invalid values.

    default_groups: n_group and topk_group of a config that lacks them. With one group every expert
    may be chosen.
    """
    fields.refuse_null("n_group", "topk_group")
    # dots.llm1 has the method's name in both
    fields.choice("scoring_func", default="sigmoid", known=("sigmoid", "noaux_tc"))
    fields.choice("topk_method", default="noaux_tc", known=("noaux_tc",))
    groups = (
        fields.integer("n_group", high=MAX_EXPERTS, default=default_groups[0]),
        fields.integer("topk_group", high=MAX_EXPERTS, default=default_groups[1]),
    )
    extra = fields.integer(
        "num_nextn_predict_layers", "num_mtp_layers", low=0, high=MAX_LAYERS, default=1
    )
    return SigmoidExperts(
        plan=parse_ffn(fields, sparse_layers, body.layers, body.hidden),
        shared_experts=fields.integer(
            "n_shared_experts", "num_shared_experts", low=0, high=1024, default=1
        ),
        groups=None if groups == (1, 1) else groups,
        renormalise=fields.flag("norm_topk_prob", default=default_renormalise),
        scale=fields.number("routed_scaling_factor", low=1e-3, high=1e3, default=default_scale),
        extra_layers=range(body.layers, body.layers + extra),
    )


def of_modules(config: SigmoidExperts) -> SigmoidExperts:
    """Return the same experts for the extra layers alone, as a model of their own."""
    count = len(config.extra_layers)
    plan = FfnPlan(replace(config.plan.moe, layers=count), range(count), None)
    return replace(config, plan=plan, extra_layers=range(0))


def parse_mlp_types(fields: Fields, layers: int, default_dense: int = 1) -> tuple[int, ...]:
    """Return the sparse layers: mlp_layer_types names them, else all but the first ones are."""
    types = fields.words("mlp_layer_types", known=("dense", "sparse"), count=layers)
    if types is None:
        first = fields.integer(
            "first_k_dense_replace", low=0, high=MAX_LAYERS, default=default_dense
        )
        return tuple(range(first, layers))
    return tuple(layer for layer, word in enumerate(types) if word == "sparse")


def sigmoid_ffn(config: SigmoidExperts, parts: Parts, layer: int, prefix: str) -> FeedForward:
    """Return layer `layer` from `prefix`.*."""
    moe = config.plan.moe

    def router() -> SigmoidRouter:
        gate = parts.tensor(f"{prefix}.gate.weight", moe.experts, moe.hidden)
        bias = parts.tensor(f"{prefix}.gate.e_score_correction_bias", moe.experts)
        return SigmoidRouter(gate, bias, moe.top_k, config.renormalise, config.scale, config.groups)

    def shared() -> GatedMlp | None:
        return shared_experts(parts, prefix, moe, config.shared_experts)

    return feed_forward(config.plan, parts, layer, prefix, router, shared)


def sigmoid_expert(name: str, config: HasSigmoidExperts) -> ExpertPart | None:
    """See Family.expert. Experts of the extra layers are not loaded."""
    if is_layer(name, config.ffn.extra_layers):
        return None
    plan = config.ffn.plan
    return MLP_EXPERTS.part(name, plan.sparse_layers, plan.moe.experts)


def sigmoid_ignores(name: str, config: HasSigmoidExperts) -> bool:
    """See Family.ignores. transformers writes empty tensors if a model has no shared experts."""
    if is_layer(name, config.ffn.extra_layers):
        return True
    if not config.ffn.shared_experts and ".mlp.shared_experts." in name:
        return True
    return ignores_buffers(name, config)
