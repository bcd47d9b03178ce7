"""DeepSeek-V2 and V2-Lite: latent attention, shared experts, dense first layers.

Math as in transformers 5.23, modeling_deepseek_v2.py. That file drops moe_layer_freq, which is
read here as in DeepSeek's own code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moeinf.models.base import ExpertPart, Family, Model, MoeShape, Parts
from moeinf.models.config import MAX_EXPERTS, MAX_LAYERS, Fields
from moeinf.models.expert_names import MLP_EXPERTS
from moeinf.models.layers.decoder import Block, BodyConfig, Decoder, ignores_buffers, parse_body
from moeinf.models.layers.feed_forward import FfnPlan, feed_forward, parse_ffn, shared_experts
from moeinf.models.layers.ffn import GatedMlp
from moeinf.models.layers.mla import MlaAttention, MlaShape, parse_mla
from moeinf.models.layers.norms import RmsNorm
from moeinf.models.layers.routing import SoftmaxRouter, require_groups


@dataclass(frozen=True)
class DeepseekV2Config:
    """The checked values of config.json."""

    body: BodyConfig
    attention: MlaShape
    ffn: FfnPlan
    shared_experts: int
    groups: tuple[int, int] | None  # n_group, topk_group of group_limited_greedy
    routed_scale: float

    @property
    def moe(self) -> MoeShape:
        return self.ffn.moe

    def __post_init__(self) -> None:
        if self.groups is not None:
            require_groups(*self.groups, self.moe.experts, self.moe.top_k)


def parse(values: Mapping[str, Any]) -> DeepseekV2Config:
    """See base.Family. Refuses norm_topk_prob: DeepSeek's code and transformers' disagree on it."""
    fields = Fields(values)
    body = parse_body(fields, default_theta=1e4, default_eps=1e-6)
    fields.refuse("mlp_bias", False)
    fields.refuse("norm_topk_prob", False)
    fields.refuse("num_key_value_heads", body.heads)
    fields.choice("scoring_func", default="softmax", known=("softmax",))
    method = fields.choice(
        "topk_method", default="greedy", known=("greedy", "group_limited_greedy")
    )
    groups = None
    if method == "group_limited_greedy":
        n_group = fields.integer("n_group", high=MAX_EXPERTS)
        groups = (n_group, fields.integer("topk_group", high=MAX_EXPERTS))
    first = fields.integer("first_k_dense_replace", low=0, high=MAX_LAYERS, default=0)
    step = fields.integer("moe_layer_freq", high=MAX_LAYERS, default=1)
    sparse = range(-(-first // step) * step, body.layers, step)
    return DeepseekV2Config(
        body=body,
        attention=parse_mla(fields, body.heads, body.rope),
        ffn=parse_ffn(fields, sparse, body.layers, body.hidden),
        shared_experts=fields.integer("n_shared_experts", low=0, high=1024, default=2),
        groups=groups,
        routed_scale=fields.number("routed_scaling_factor", low=1e-3, high=1e3, default=1.0),
    )


def build(config: DeepseekV2Config, parts: Parts) -> Model:
    """See base.Family."""
    shape = config.attention
    blocks = [_block(config, parts, layer) for layer in range(config.body.layers)]
    return Decoder(config.body, config.moe, shape.planes, shape.rope, blocks, parts)


def _block(config: DeepseekV2Config, parts: Parts, layer: int) -> Block:
    body, moe, prefix = config.body, config.moe, f"model.layers.{layer}"
    mlp = f"{prefix}.mlp"

    def norm(name: str) -> RmsNorm:
        return RmsNorm(parts.tensor(f"{prefix}.{name}.weight", body.hidden), body.norm_eps)

    def router() -> SoftmaxRouter:
        gate = parts.tensor(f"{mlp}.gate.weight", moe.experts, moe.hidden)
        scale, groups = config.routed_scale, config.groups
        return SoftmaxRouter(gate, moe.top_k, False, scale=scale, groups=groups)

    def shared() -> GatedMlp | None:
        return shared_experts(parts, mlp, moe, config.shared_experts)

    return Block(
        attention_norm=norm("input_layernorm"),
        attention=MlaAttention(layer, config.attention, body.hidden, parts, f"{prefix}.self_attn"),
        ffn_norm=norm("post_attention_layernorm"),
        ffn=feed_forward(config.ffn, parts, layer, mlp, router, shared),
    )


def expert(name: str, config: DeepseekV2Config) -> ExpertPart | None:
    """See base.Family."""
    return MLP_EXPERTS.part(name, config.ffn.sparse_layers, config.moe.experts)


def ignores(name: str, config: DeepseekV2Config) -> bool:
    """See base.Family. transformers writes empty tensors if a model has no shared experts."""
    if not config.shared_experts and ".mlp.shared_experts." in name:
        return True
    return ignores_buffers(name, config)


FAMILY = Family("deepseek_v2", parse, build, expert, ignores)
