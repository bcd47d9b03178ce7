"""OLMoE: full-projection query and key norms, and many small experts.

Math as in transformers 5.23, modeling_olmoe.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moeinf.models.base import ExpertPart, Family, Model, MoeShape, Parts
from moeinf.models.config import Fields, require
from moeinf.models.expert_names import MLP_EXPERTS
from moeinf.models.layers.attention import GqaAttention, GqaShape, gqa_projections, parse_gqa
from moeinf.models.layers.decoder import Block, BodyConfig, Decoder, ignores_buffers, parse_body
from moeinf.models.layers.moe import SparseFfn, parse_moe
from moeinf.models.layers.norms import RmsNorm
from moeinf.models.layers.routing import SoftmaxRouter


@dataclass(frozen=True)
class OlmoeConfig:
    """The checked values of config.json."""

    body: BodyConfig
    attention: GqaShape
    moe: MoeShape
    renormalise: bool  # norm_topk_prob

    def __post_init__(self) -> None:
        wide = self.attention.heads * self.attention.head_dim
        require(
            wide == self.body.hidden,
            f"heads of {self.attention.head_dim} do not fill hidden_size {self.body.hidden}",
        )


def parse(values: Mapping[str, Any]) -> OlmoeConfig:
    """See base.Family."""
    fields = Fields(values)
    body = parse_body(fields, default_theta=1e4, default_eps=1e-5)
    fields.refuse("sliding_window")
    shape = replace(
        parse_gqa(fields, body.hidden, body.heads),
        bias=fields.flag("attention_bias"),
        clip=fields.optional_number("clip_qkv", low=1e-6, high=1e6),
    )
    return OlmoeConfig(
        body=body,
        attention=shape,
        moe=parse_moe(fields, body.layers, body.hidden, "intermediate_size"),
        renormalise=fields.flag("norm_topk_prob"),
    )


def build(config: OlmoeConfig, parts: Parts) -> Model:
    """See base.Family."""
    shape = config.attention
    blocks = [_block(config, parts, layer) for layer in range(config.body.layers)]
    return Decoder(config.body, config.moe, shape.planes, shape.head_dim, blocks, parts)


def _block(config: OlmoeConfig, parts: Parts, layer: int) -> Block:
    body, moe, prefix = config.body, config.moe, f"model.layers.{layer}"
    shape, attention = config.attention, f"{prefix}.self_attn"
    gate = parts.tensor(f"{prefix}.mlp.gate.weight", moe.experts, moe.hidden)

    def norm(name: str, width: int) -> RmsNorm:
        return RmsNorm(parts.tensor(f"{name}.weight", width), body.norm_eps)

    return Block(
        attention_norm=norm(f"{prefix}.input_layernorm", body.hidden),
        attention=GqaAttention(
            layer,
            shape,
            gqa_projections(parts, attention, body.hidden, shape),
            q_norm=norm(f"{attention}.q_norm", shape.heads * shape.head_dim),
            k_norm=norm(f"{attention}.k_norm", shape.kv_heads * shape.head_dim),
        ),
        ffn_norm=norm(f"{prefix}.post_attention_layernorm", body.hidden),
        ffn=SparseFfn(layer, SoftmaxRouter(gate, moe.top_k, config.renormalise)),
    )


def expert(name: str, config: OlmoeConfig) -> ExpertPart | None:
    """See base.Family."""
    return MLP_EXPERTS.part(name, range(config.body.layers), config.moe.experts)


FAMILY = Family("olmoe", parse, build, expert, ignores_buffers)
