"""Granite 3 MoE: four multipliers on a Mixtral-like decoder, experts stored as fused tensors.

Math as in transformers 5.23, modeling_granitemoe.py. Its softmax over the chosen logits equals the
softmax over all of them, renormalised. `granitemoeshared` adds one expert that runs for all tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from moeinf.models.base import (
    ExpertPart,
    Family,
    FusedPart,
    Model,
    MoeShape,
    Parts,
)
from moeinf.models.config import MAX_WIDTH, Fields
from moeinf.models.expert_names import known_layer
from moeinf.models.layers.attention import (
    GqaAttention,
    GqaCore,
    GqaShape,
    gqa_projections,
    parse_gqa,
)
from moeinf.models.layers.decoder import Block, BodyConfig, Decoder, ignores_buffers, parse_body
from moeinf.models.layers.ffn import FusedMlp
from moeinf.models.layers.kv_cache import PassRows
from moeinf.models.layers.moe import SparseFfn, parse_moe
from moeinf.models.layers.norms import RmsNorm
from moeinf.models.layers.routing import SoftmaxRouter

_FUSED = re.compile(
    r"model\.layers\.(0|[1-9][0-9]{0,8})\.block_sparse_moe\.(input|output)_linear\.weight"
)
_ROLES: Mapping[str, Literal["gate_up", "down"]] = {"input": "gate_up", "output": "down"}


@dataclass(frozen=True)
class GraniteMoeConfig:
    """The checked values of config.json."""

    body: BodyConfig
    attention: GqaShape
    moe: MoeShape
    residual: float  # residual_multiplier
    shared: int = 0  # shared_intermediate_size


def parse(values: Mapping[str, Any]) -> GraniteMoeConfig:
    """See base.Family."""
    fields = Fields(values)
    body = parse_body(fields, default_theta=1e4, default_eps=1e-6)

    def multiplier(name: str) -> float:
        return fields.number(name, low=1e-6, high=1e6, default=1.0)

    shape = replace(
        parse_gqa(fields, body.hidden, body.heads),
        bias=fields.flag("attention_bias"),
        scale=multiplier("attention_multiplier"),
    )
    return GraniteMoeConfig(
        body=replace(
            body,
            embedding_scale=multiplier("embedding_multiplier"),
            logits_scale=multiplier("logits_scaling"),
        ),
        attention=shape,
        moe=parse_moe(fields, body.layers, body.hidden, "intermediate_size"),
        residual=multiplier("residual_multiplier"),
    )


def parse_shared(values: Mapping[str, Any]) -> GraniteMoeConfig:
    """See base.Family."""
    shared = Fields(values).integer("shared_intermediate_size", low=0, high=MAX_WIDTH, default=0)
    return replace(parse(values), shared=shared)


def build(config: GraniteMoeConfig, parts: Parts) -> Model:
    """See base.Family."""
    shape = config.attention
    blocks = [
        block(config, parts, layer, attention(config, parts, layer, layer))
        for layer in range(config.body.layers)
    ]
    return Decoder(config.body, config.moe, shape.planes, shape.head_dim, blocks, parts)


def attention(
    config: GraniteMoeConfig, parts: Parts, layer: int, place: int, core: type[GqaCore] = GqaCore
) -> GqaAttention:
    """Return the attention of a layer, the `place`-th that has one."""
    name, hidden = f"model.layers.{layer}.self_attn", config.body.hidden
    projections = gqa_projections(parts, name, hidden, config.attention)
    return GqaAttention(place, config.attention, projections, core=core)


def block(
    config: GraniteMoeConfig,
    parts: Parts,
    layer: int,
    mixer: Callable[[Tensor, PassRows], Tensor],
) -> Block:
    """Return a layer around its attention, or what it has instead."""
    body, moe, prefix = config.body, config.moe, f"model.layers.{layer}"
    gate = parts.tensor(f"{prefix}.block_sparse_moe.router.layer.weight", moe.experts, moe.hidden)

    def norm(name: str) -> RmsNorm:
        return RmsNorm(parts.tensor(f"{prefix}.{name}.weight", body.hidden), body.norm_eps)

    return Block(
        attention_norm=norm("input_layernorm"),
        attention=mixer,
        ffn_norm=norm("post_attention_layernorm"),
        ffn=SparseFfn(
            layer, SoftmaxRouter(gate, moe.top_k, renormalise=True), _shared(config, parts, prefix)
        ),
        residual=config.residual,
    )


def _shared(config: GraniteMoeConfig, parts: Parts, prefix: str) -> FusedMlp | None:
    width, hidden = config.shared, config.body.hidden
    if not width:
        return None
    return FusedMlp(
        gate_up=parts.linear(f"{prefix}.shared_mlp.input_linear", 2 * width, hidden),
        down=parts.linear(f"{prefix}.shared_mlp.output_linear", hidden, width),
    )


def expert(name: str, config: GraniteMoeConfig) -> ExpertPart | None:
    """See base.Family. No expert has a tensor of its own."""
    return None


def fused(name: str, config: GraniteMoeConfig) -> FusedPart | None:
    """See base.Family. Raises ModelDataError for a layer that the config does not have."""
    match = _FUSED.fullmatch(name)
    if match is None:
        return None
    layer = known_layer(name, match[1], config.body.layers)
    return FusedPart(layer, _ROLES[match[2]])


FAMILY = Family("granitemoe", parse, build, expert, ignores_buffers, fused)
SHARED = Family("granitemoeshared", parse_shared, build, expert, ignores_buffers, fused)
