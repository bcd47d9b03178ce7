"""Mixtral: grouped-query attention, and eight large experts of which two run.

Math as in transformers 5.23, modeling_mixtral.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moeinf.models.base import ExpertPart, Family, Model, MoeShape, Parts
from moeinf.models.config import MAX_CONTEXT, Fields, require
from moeinf.models.expert_names import BLOCK_SPARSE_EXPERTS
from moeinf.models.layers.attention import GqaAttention, GqaShape, gqa_projections, parse_gqa
from moeinf.models.layers.decoder import Block, BodyConfig, Decoder, ignores_buffers, parse_body
from moeinf.models.layers.moe import SparseFfn, parse_moe
from moeinf.models.layers.norms import RmsNorm
from moeinf.models.layers.routing import SoftmaxRouter

# Keys of another model with this model_type, whose own code scales what its experts return.
_LLAMA_MOE = ("moe_type", "scale_factor", "intermediate_size_residual")


@dataclass(frozen=True)
class MixtralConfig:
    """The checked values of config.json."""

    body: BodyConfig
    attention: GqaShape
    moe: MoeShape


def parse(values: Mapping[str, Any]) -> MixtralConfig:
    """See base.Family. A sliding window is supported."""
    fields = Fields(values)
    for name in _LLAMA_MOE:
        require(
            not fields.has(name),
            f"model_type mixtral with {name} is LLaMA-MoE-v2, which is not supported",
        )
    body = parse_body(fields, default_theta=1e6, default_eps=1e-5)
    fields.refuse("attention_bias", False)
    window = fields.optional_integer("sliding_window", high=MAX_CONTEXT)
    shape = parse_gqa(fields, body.hidden, body.heads)
    return MixtralConfig(
        body=body,
        attention=replace(shape, window=window),
        moe=parse_moe(fields, body.layers, body.hidden, "intermediate_size"),
    )


def build(config: MixtralConfig, parts: Parts) -> Model:
    """See base.Family."""
    shape = config.attention
    blocks = [_block(config, parts, layer) for layer in range(config.body.layers)]
    return Decoder(config.body, config.moe, shape.planes, shape.head_dim, blocks, parts)


def _block(config: MixtralConfig, parts: Parts, layer: int) -> Block:
    body, moe, prefix = config.body, config.moe, f"model.layers.{layer}"
    gate = parts.tensor(f"{prefix}.block_sparse_moe.gate.weight", moe.experts, moe.hidden)

    def norm(name: str) -> RmsNorm:
        return RmsNorm(parts.tensor(f"{prefix}.{name}.weight", body.hidden), body.norm_eps)

    projections = gqa_projections(parts, f"{prefix}.self_attn", body.hidden, config.attention)
    return Block(
        attention_norm=norm("input_layernorm"),
        attention=GqaAttention(layer, config.attention, projections),
        ffn_norm=norm("post_attention_layernorm"),
        ffn=SparseFfn(layer, SoftmaxRouter(gate, moe.top_k, renormalise=True)),
    )


def expert(name: str, config: MixtralConfig) -> ExpertPart | None:
    """See base.Family."""
    return BLOCK_SPARSE_EXPERTS.part(name, range(config.body.layers), config.moe.experts)


FAMILY = Family("mixtral", parse, build, expert, ignores_buffers)
