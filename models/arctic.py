"""Snowflake Arctic: a dense residual network, and beside it experts that read the layer's input.

Math as in Snowflake's published modeling_arctic.py:

    h   = x + attention(input_layernorm(x))
    out = h + residual_mlp(residual_layernorm(h)) + experts(post_attention_layernorm(x))

The experts do not wait for attention: they are submitted first and load while it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moeinf.models.base import ExpertPart, Family, Model, MoeShape, Parts
from moeinf.models.config import MAX_CONTEXT, Fields
from moeinf.models.expert_names import BLOCK_SPARSE_EXPERTS
from moeinf.models.layers.attention import GqaAttention, GqaShape, gqa_projections, parse_gqa
from moeinf.models.layers.decoder import (
    BodyConfig,
    Decoder,
    ignores_buffers,
    parse_body,
)
from moeinf.models.layers.ffn import GatedMlp
from moeinf.models.layers.moe import SparseFfn, parse_moe
from moeinf.models.layers.norms import RmsNorm
from moeinf.models.layers.parallel_block import ParallelBlock
from moeinf.models.layers.routing import SoftmaxRouter


@dataclass(frozen=True)
class ArcticConfig:
    """The checked values of config.json."""

    body: BodyConfig
    attention: GqaShape
    moe: MoeShape


def parse(values: Mapping[str, Any]) -> ArcticConfig:
    """See base.Family. Experts must be in every layer and in parallel, as published."""
    fields = Fields(values)
    # transformers 5 lacks this family, and Snowflake's own defaults describe other models.
    fields.expect("moe_layer_frequency", "parallel_attn_mlp_res", "rms_norm_eps", "rope_theta")
    fields.refuse_null("moe_layer_frequency", "parallel_attn_mlp_res", "rope_theta")
    body = parse_body(fields, default_theta=1e4, default_eps=1e-5)
    fields.refuse("moe_layer_frequency", 1)
    fields.refuse("parallel_attn_mlp_res", True)
    fields.refuse("use_residual", True)
    shape = replace(
        parse_gqa(fields, body.hidden, body.heads),
        bias=fields.flag("attention_bias"),
        window=fields.optional_integer("sliding_window", high=MAX_CONTEXT),
    )
    return ArcticConfig(
        body, shape, parse_moe(fields, body.layers, body.hidden, "intermediate_size")
    )


def build(config: ArcticConfig, parts: Parts) -> Model:
    """See base.Family."""
    shape = config.attention
    blocks = [_block(config, parts, layer) for layer in range(config.body.layers)]
    return Decoder(config.body, config.moe, shape.planes, shape.head_dim, blocks, parts)


def _block(config: ArcticConfig, parts: Parts, layer: int) -> ParallelBlock:
    body, moe, prefix = config.body, config.moe, f"model.layers.{layer}"
    gate = parts.tensor(f"{prefix}.block_sparse_moe.gate.weight", moe.experts, moe.hidden)

    def norm(name: str) -> RmsNorm:
        return RmsNorm(parts.tensor(f"{prefix}.{name}.weight", body.hidden), body.norm_eps)

    w1, w2, w3 = (  # as wide as the model
        parts.linear(f"{prefix}.residual_mlp.{name}", body.hidden, body.hidden)
        for name in ("w1", "w2", "w3")
    )
    projections = gqa_projections(parts, f"{prefix}.self_attn", body.hidden, config.attention)
    return ParallelBlock(
        attention_norm=norm("input_layernorm"),
        attention=GqaAttention(layer, config.attention, projections),
        residual_norm=norm("residual_layernorm"),
        residual=GatedMlp(gate=w1, up=w3, down=w2),
        ffn_norm=norm("post_attention_layernorm"),
        ffn=SparseFfn(layer, SoftmaxRouter(gate, moe.top_k, renormalise=True)),
    )


def expert(name: str, config: ArcticConfig) -> ExpertPart | None:
    """See base.Family."""
    return BLOCK_SPARSE_EXPERTS.part(name, range(config.body.layers), config.moe.experts)


FAMILY = Family("arctic", parse, build, expert, ignores_buffers)
