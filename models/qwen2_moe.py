"""Qwen2-MoE and Qwen1.5-MoE: biased projections, and a shared expert behind a gate of its own.

Math as in transformers 5.23, modeling_qwen2_moe.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moeinf.models.base import ExpertPart, Family, Linear, Model, MoeShape, Parts
from moeinf.models.config import MAX_CONTEXT, MAX_LAYERS, MAX_WIDTH, Fields
from moeinf.models.expert_names import MLP_EXPERTS
from moeinf.models.layers.attention import GqaAttention, GqaShape, gqa_projections, parse_gqa
from moeinf.models.layers.decoder import Block, BodyConfig, Decoder, ignores_buffers, parse_body
from moeinf.models.layers.feed_forward import FfnPlan, feed_forward, parse_ffn, parse_sparse_step
from moeinf.models.layers.ffn import gated_shared
from moeinf.models.layers.norms import RmsNorm
from moeinf.models.layers.routing import SoftmaxRouter

_SLIDING = "sliding_attention"


@dataclass(frozen=True)
class Qwen2MoeConfig:
    """The checked values of config.json."""

    body: BodyConfig
    attention: GqaShape
    sliding: frozenset[int]  # the layers that see only the shape's window
    ffn: FfnPlan
    shared_intermediate: int
    renormalise: bool  # norm_topk_prob

    @property
    def moe(self) -> MoeShape:
        return self.ffn.moe


def parse(values: Mapping[str, Any]) -> Qwen2MoeConfig:
    """See base.Family. A sliding window applies only with use_sliding_window."""
    fields = Fields(values)
    body = parse_body(fields, default_theta=1e4, default_eps=1e-6)
    shape = replace(
        parse_gqa(fields, body.hidden, body.heads), qkv_bias=fields.flag("qkv_bias", default=True)
    )
    sliding: frozenset[int] = frozenset()
    if fields.flag("use_sliding_window"):
        fields.refuse_null("sliding_window")
        window = fields.integer("sliding_window", high=MAX_CONTEXT, default=4096)
        shape, sliding = replace(shape, window=window), _sliding_layers(fields, body.layers)
    return Qwen2MoeConfig(
        body=body,
        attention=shape,
        sliding=sliding,
        ffn=parse_ffn(fields, parse_sparse_step(fields, body.layers), body.layers, body.hidden),
        shared_intermediate=fields.integer("shared_expert_intermediate_size", high=MAX_WIDTH),
        renormalise=fields.flag("norm_topk_prob"),
    )


def _sliding_layers(fields: Fields, layers: int) -> frozenset[int]:
    """Return the layers with a window.

    layer_types names them. Without it they are every second one of the first max_window_layers.
    """
    types = fields.words("layer_types", known=("full_attention", _SLIDING), count=layers)
    if types is not None:
        return frozenset(layer for layer, word in enumerate(types) if word == _SLIDING)
    limit = fields.integer("max_window_layers", low=0, high=MAX_LAYERS, default=28)
    return frozenset(range(0, min(limit, layers), 2))


def build(config: Qwen2MoeConfig, parts: Parts) -> Model:
    """See base.Family."""
    shape = config.attention
    blocks = [_block(config, parts, layer) for layer in range(config.body.layers)]
    return Decoder(config.body, config.moe, shape.planes, shape.head_dim, blocks, parts)


def _block(config: Qwen2MoeConfig, parts: Parts, layer: int) -> Block:
    body, moe, prefix = config.body, config.moe, f"model.layers.{layer}"
    shape, mlp = config.attention, f"{prefix}.mlp"
    if layer not in config.sliding:
        shape = replace(shape, window=None)

    def norm(name: str) -> RmsNorm:
        return RmsNorm(parts.tensor(f"{prefix}.{name}.weight", body.hidden), body.norm_eps)

    def router() -> SoftmaxRouter:
        gate = parts.tensor(f"{mlp}.gate.weight", moe.experts, moe.hidden)
        return SoftmaxRouter(gate, moe.top_k, config.renormalise)

    def shared() -> Linear:
        return gated_shared(parts, mlp, body.hidden, config.shared_intermediate)

    projections = gqa_projections(parts, f"{prefix}.self_attn", body.hidden, shape)
    return Block(
        attention_norm=norm("input_layernorm"),
        attention=GqaAttention(layer, shape, projections),
        ffn_norm=norm("post_attention_layernorm"),
        ffn=feed_forward(config.ffn, parts, layer, mlp, router, shared),
    )


def expert(name: str, config: Qwen2MoeConfig) -> ExpertPart | None:
    """See base.Family."""
    return MLP_EXPERTS.part(name, config.ffn.sparse_layers, config.moe.experts)


FAMILY = Family("qwen2_moe", parse, build, expert, ignores_buffers)
