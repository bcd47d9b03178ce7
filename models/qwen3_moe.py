"""Qwen3-MoE: query and key norms per head, renormalised routing, optional dense layers.

Math as in transformers 5.23, modeling_qwen3_moe.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moeinf.models.base import ExpertPart, Family, Model, MoeShape, Parts
from moeinf.models.config import MAX_CONTEXT, Fields
from moeinf.models.expert_names import MLP_EXPERTS
from moeinf.models.layers.attention import GqaAttention, GqaShape, gqa_projections, parse_gqa
from moeinf.models.layers.decoder import Block, BodyConfig, Decoder, ignores_buffers, parse_body
from moeinf.models.layers.feed_forward import FfnPlan, feed_forward, parse_ffn, parse_sparse_step
from moeinf.models.layers.norms import HeadNorm, RmsNorm
from moeinf.models.layers.routing import SoftmaxRouter


@dataclass(frozen=True)
class Qwen3MoeConfig:
    """The checked values of config.json."""

    body: BodyConfig
    attention: GqaShape
    ffn: FfnPlan
    renormalise: bool  # norm_topk_prob

    @property
    def moe(self) -> MoeShape:
        return self.ffn.moe


def parse(values: Mapping[str, Any]) -> Qwen3MoeConfig:
    """See base.Family. A sliding window applies only with use_sliding_window."""
    fields = Fields(values)
    body = parse_body(fields, default_theta=1e4, default_eps=1e-6)
    window = None
    if fields.flag("use_sliding_window"):  # absent: 4096, null: no window, as in transformers
        window = fields.optional_integer("sliding_window", high=MAX_CONTEXT)
        window = window if "sliding_window" in values else 4096
    shape = replace(
        parse_gqa(fields, body.hidden, body.heads),
        bias=fields.flag("attention_bias"),
        window=window,
    )
    return Qwen3MoeConfig(
        body=body,
        attention=shape,
        ffn=parse_ffn(fields, parse_sparse_step(fields, body.layers), body.layers, body.hidden),
        renormalise=fields.flag("norm_topk_prob"),
    )


def build(config: Qwen3MoeConfig, parts: Parts) -> Model:
    """See base.Family."""
    shape = config.attention
    blocks = [_block(config, parts, layer) for layer in range(config.body.layers)]
    return Decoder(config.body, config.moe, shape.planes, shape.head_dim, blocks, parts)


def _block(config: Qwen3MoeConfig, parts: Parts, layer: int) -> Block:
    body, shape, moe = config.body, config.attention, config.moe
    prefix = f"model.layers.{layer}"
    attention = f"{prefix}.self_attn"

    def norm(name: str, width: int) -> RmsNorm:
        return RmsNorm(parts.tensor(f"{name}.weight", width), body.norm_eps)

    def router() -> SoftmaxRouter:
        gate = parts.tensor(f"{prefix}.mlp.gate.weight", moe.experts, moe.hidden)
        return SoftmaxRouter(gate, moe.top_k, config.renormalise)

    return Block(
        attention_norm=norm(f"{prefix}.input_layernorm", body.hidden),
        attention=GqaAttention(
            layer,
            shape,
            gqa_projections(parts, attention, body.hidden, shape),
            q_norm=HeadNorm(norm(f"{attention}.q_norm", shape.head_dim)),
            k_norm=HeadNorm(norm(f"{attention}.k_norm", shape.head_dim)),
        ),
        ffn_norm=norm(f"{prefix}.post_attention_layernorm", body.hidden),
        ffn=feed_forward(config.ffn, parts, layer, f"{prefix}.mlp", router),
    )


def expert(name: str, config: Qwen3MoeConfig) -> ExpertPart | None:
    """See base.Family."""
    return MLP_EXPERTS.part(name, config.ffn.sparse_layers, config.moe.experts)


FAMILY = Family("qwen3_moe", parse, build, expert, ignores_buffers)
