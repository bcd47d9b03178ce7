"""ERNIE-4.5: rope on neighbouring pairs, softmax routing with a bias on the choice.

Math as in transformers 5.23, modeling_ernie4_5_moe.py, for text alone. Multi-token prediction (mtp)
is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moeinf.models.base import ExpertPart, Family, Model, MoeShape, Parts
from moeinf.models.config import MAX_LAYERS, Fields
from moeinf.models.expert_names import MLP_EXPERTS
from moeinf.models.layers.attention import (
    GqaAttention,
    GqaShape,
    InterleavedRopeCore,
    gqa_projections,
    parse_gqa,
)
from moeinf.models.layers.decoder import Block, BodyConfig, Decoder, ignores_buffers, parse_body
from moeinf.models.layers.feed_forward import FfnPlan, feed_forward, parse_ffn, shared_experts
from moeinf.models.layers.ffn import GatedMlp
from moeinf.models.layers.norms import RmsNorm
from moeinf.models.layers.routing import BiasedSoftmaxRouter


@dataclass(frozen=True)
class Ernie45MoeConfig:
    """The checked values of config.json."""

    body: BodyConfig
    attention: GqaShape
    ffn: FfnPlan
    shared_experts: int

    @property
    def moe(self) -> MoeShape:
        return self.ffn.moe


def parse(values: Mapping[str, Any]) -> Ernie45MoeConfig:
    """See base.Family. transformers clamps the sum of weights at moe_norm_min, 1e-12."""
    fields = Fields(values)
    fields.refuse("use_bias", False)
    fields.refuse("moe_norm_min", 1e-12)
    fields.refuse_null("moe_norm_min", "moe_num_shared_experts", "moe_layer_interval")
    fields.refuse_null("moe_layer_start_index", "moe_layer_end_index")
    body = parse_body(fields, default_theta=5e5, default_eps=1e-5)
    start = fields.integer("moe_layer_start_index", low=0, high=MAX_LAYERS, default=1)
    end = fields.integer("moe_layer_end_index", low=-1, high=MAX_LAYERS, default=-1)
    step = fields.integer("moe_layer_interval", high=MAX_LAYERS, default=1)
    last = body.layers - 1 if end == -1 else end
    sparse = [n for n in range(start, min(last + 1, body.layers)) if (n + 1) % step == 0]
    return Ernie45MoeConfig(
        body=replace(body, tied_embeddings=fields.flag("tie_word_embeddings", default=True)),
        attention=parse_gqa(fields, body.hidden, body.heads),
        ffn=parse_ffn(fields, tuple(sparse), body.layers, body.hidden),
        shared_experts=fields.integer("moe_num_shared_experts", low=0, high=1024, default=2),
    )


def build(config: Ernie45MoeConfig, parts: Parts) -> Model:
    """See base.Family."""
    shape = config.attention
    blocks = [_block(config, parts, layer) for layer in range(config.body.layers)]
    return Decoder(config.body, config.moe, shape.planes, shape.head_dim, blocks, parts)


def _block(config: Ernie45MoeConfig, parts: Parts, layer: int) -> Block:
    body, shape, moe = config.body, config.attention, config.moe
    prefix = f"model.layers.{layer}"
    mlp = f"{prefix}.mlp"

    def norm(name: str) -> RmsNorm:
        return RmsNorm(parts.tensor(f"{prefix}.{name}.weight", body.hidden), body.norm_eps)

    def router() -> BiasedSoftmaxRouter:
        bias = parts.tensor(f"{mlp}.moe_statics.e_score_correction_bias", 1, moe.experts)
        gate = parts.tensor(f"{mlp}.gate.weight", moe.experts, moe.hidden)
        return BiasedSoftmaxRouter(gate, bias[0], moe.top_k, renormalise=True)

    def shared() -> GatedMlp | None:
        return shared_experts(parts, mlp, moe, config.shared_experts)

    projections = gqa_projections(parts, f"{prefix}.self_attn", body.hidden, shape)
    return Block(
        attention_norm=norm("input_layernorm"),
        attention=GqaAttention(layer, shape, projections, core=InterleavedRopeCore),
        ffn_norm=norm("post_attention_layernorm"),
        ffn=feed_forward(config.ffn, parts, layer, mlp, router, shared),
    )


def expert(name: str, config: Ernie45MoeConfig) -> ExpertPart | None:
    """See base.Family."""
    if _is_aside(name):
        return None
    return MLP_EXPERTS.part(name, config.ffn.sparse_layers, config.moe.experts)


def ignores(name: str, config: Ernie45MoeConfig) -> bool:
    """See base.Family."""
    return _is_aside(name) or ignores_buffers(name, config)


def _is_aside(name: str) -> bool:
    return name.startswith("model.mtp_")


FAMILY = Family("ernie4_5_moe", parse, build, expert, ignores)
