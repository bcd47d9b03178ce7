"""GLM-4.5, 4.6 and 4.7: half of each head rotates, experts chosen by sigmoid scores.

Math as in transformers 5.23, modeling_glm4_moe.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moeinf.models.base import Family, Model, MoeShape, Parts
from moeinf.models.config import MAX_LAYERS, Fields
from moeinf.models.layers.attention import GqaAttention, GqaShape, gqa_projections, parse_gqa
from moeinf.models.layers.decoder import Block, BodyConfig, Decoder, parse_body
from moeinf.models.layers.norms import HeadNorm, RmsNorm
from moeinf.models.layers.sigmoid_experts import (
    SigmoidExperts,
    parse_sigmoid_experts,
    sigmoid_expert,
    sigmoid_ffn,
    sigmoid_ignores,
)


@dataclass(frozen=True)
class Glm4MoeConfig:
    """The checked values of config.json."""

    body: BodyConfig
    attention: GqaShape
    turning: int  # dimensions of a head that rotate: partial_rotary_factor
    head_norms: bool  # use_qk_norm
    ffn: SigmoidExperts

    @property
    def moe(self) -> MoeShape:
        return self.ffn.plan.moe


def parse(values: Mapping[str, Any]) -> Glm4MoeConfig:
    """See base.Family."""
    fields = Fields(values)
    body = parse_body(fields, default_theta=1e4, default_eps=1e-5, default_partial=0.5)
    shape = parse_gqa(fields, body.hidden, body.heads)
    first = fields.integer("first_k_dense_replace", low=0, high=MAX_LAYERS, default=1)
    return Glm4MoeConfig(
        body=body,
        attention=replace(shape, qkv_bias=fields.flag("attention_bias")),
        turning=body.rope.turning(shape.head_dim),
        head_norms=fields.flag("use_qk_norm"),
        ffn=parse_sigmoid_experts(fields, body, range(first, body.layers), default_scale=1.0),
    )


def build(config: Glm4MoeConfig, parts: Parts) -> Model:
    """See base.Family."""
    shape = config.attention
    blocks = [_block(config, parts, layer) for layer in range(config.body.layers)]
    return Decoder(config.body, config.moe, shape.planes, config.turning, blocks, parts)


def _block(config: Glm4MoeConfig, parts: Parts, layer: int) -> Block:
    body, shape, prefix = config.body, config.attention, f"model.layers.{layer}"
    attention = f"{prefix}.self_attn"

    def norm(name: str, width: int) -> RmsNorm:
        return RmsNorm(parts.tensor(f"{name}.weight", width), body.norm_eps)

    def head_norm(name: str) -> HeadNorm | None:
        return HeadNorm(norm(f"{attention}.{name}", shape.head_dim)) if config.head_norms else None

    return Block(
        attention_norm=norm(f"{prefix}.input_layernorm", body.hidden),
        attention=GqaAttention(
            layer,
            shape,
            gqa_projections(parts, attention, body.hidden, shape),
            q_norm=head_norm("q_norm"),
            k_norm=head_norm("k_norm"),
        ),
        ffn_norm=norm(f"{prefix}.post_attention_layernorm", body.hidden),
        ffn=sigmoid_ffn(config.ffn, parts, layer, f"{prefix}.mlp"),
    )


FAMILY = Family("glm4_moe", parse, build, sigmoid_expert, sigmoid_ignores)
