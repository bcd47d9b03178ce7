"""LFM2-MoE: gated short convolutions, a few layers of attention, sigmoid routing.

Math as in transformers 5.23, modeling_lfm2_moe.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moeinf.models.base import ExpertPart, Family, Linear, Model, MoeShape, Parts
from moeinf.models.config import MAX_LAYERS, Fields, require
from moeinf.models.expert_names import ExpertNames
from moeinf.models.layers.attention import GqaAttention, GqaShape, Projections, parse_gqa
from moeinf.models.layers.decoder import Block, BodyConfig, Decoder, ignores_buffers, parse_body
from moeinf.models.layers.feed_forward import FfnPlan, feed_forward, parse_ffn
from moeinf.models.layers.norms import HeadNorm, RmsNorm
from moeinf.models.layers.routing import SigmoidRouter
from moeinf.models.layers.short_conv import ShortConv, conv_memory

_CONV, _FULL = "conv", "full_attention"
_MAX_KERNEL = 64
_EXPERTS = ExpertNames(
    "model.layers.{layer}.feed_forward.experts.{expert}.{role}.weight",
    {"w1": "gate", "w3": "up", "w2": "down"},
)
_RENAMED = {  # names of the dense networks and of the last norm -> the usual ones
    ".feed_forward.w1.": ".feed_forward.gate_proj.",
    ".feed_forward.w3.": ".feed_forward.up_proj.",
    ".feed_forward.w2.": ".feed_forward.down_proj.",
    "model.embedding_norm.": "model.norm.",
}


@dataclass(frozen=True)
class Lfm2MoeConfig:
    """The checked values of config.json."""

    body: BodyConfig
    attention: GqaShape
    full: tuple[int, ...]  # the layers with attention, ascending
    kernel: int  # conv_L_cache
    conv_bias: bool
    ffn: FfnPlan
    expert_bias: bool  # use_expert_bias
    renormalise: bool  # norm_topk_prob
    scale: float  # routed_scaling_factor

    def __post_init__(self) -> None:
        require(len(self.full) > 0, "no layer has attention")

    @property
    def moe(self) -> MoeShape:
        return self.ffn.moe


def parse(values: Mapping[str, Any]) -> Lfm2MoeConfig:
    """See base.Family. tie_embedding, where it is present, wins over tie_word_embeddings."""
    fields = Fields(values)
    fields.expect("layer_types")
    fields.refuse_null("layer_types", "tie_embedding")
    eps = fields.number("norm_eps", low=0.0, high=1.0, default=1e-5)
    body = parse_body(fields, default_theta=1e6, default_eps=eps)
    tied = fields.flag("tie_embedding", fields.flag("tie_word_embeddings", default=True))
    kinds = fields.words("layer_types", known=(_CONV, _FULL), count=body.layers)
    assert kinds is not None
    first = fields.integer("num_dense_layers", low=0, high=MAX_LAYERS, default=2)
    return Lfm2MoeConfig(
        body=replace(body, norm_eps=eps, tied_embeddings=tied),
        attention=parse_gqa(fields, body.hidden, body.heads),
        full=tuple(layer for layer, kind in enumerate(kinds) if kind == _FULL),
        kernel=fields.integer("conv_L_cache", low=2, high=_MAX_KERNEL, default=3),
        conv_bias=fields.flag("conv_bias"),
        ffn=parse_ffn(fields, range(first, body.layers), body.layers, body.hidden),
        expert_bias=fields.flag("use_expert_bias", default=True),
        renormalise=fields.flag("norm_topk_prob", default=True),
        scale=fields.number("routed_scaling_factor", low=1e-3, high=1e3, default=1.0),
    )


class Lfm2Router(SigmoidRouter):
    """A SigmoidRouter that adds 1e-6 to the sum of the weights."""

    def weigh(self, scores: Tensor, ids: Tensor) -> Tensor:
        """See cache_aware.Judge."""
        weights = scores.gather(1, ids)
        if self.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-6)
        return weights * self.scale


def build(config: Lfm2MoeConfig, parts: Parts) -> Model:
    """See base.Family."""
    shape, body = config.attention, config.body
    blocks = [_block(config, parts, layer) for layer in range(body.layers)]
    convs = body.layers - len(config.full)
    memory = conv_memory(convs, body.hidden, config.kernel) if convs else None
    return Decoder(body, config.moe, shape.planes, shape.head_dim, blocks, parts, memory)


def _block(config: Lfm2MoeConfig, parts: Parts, layer: int) -> Block:
    body, moe, prefix = config.body, config.moe, f"model.layers.{layer}"
    mlp = f"{prefix}.feed_forward"

    def router() -> Lfm2Router:
        gate = parts.tensor(f"{mlp}.gate.weight", moe.experts, moe.hidden)
        if config.expert_bias:
            bias = parts.tensor(f"{mlp}.expert_bias", moe.experts)
        else:
            bias = torch.zeros_like(gate[:, 0])
        return Lfm2Router(gate, bias, moe.top_k, config.renormalise, config.scale)

    return Block(
        attention_norm=_norm(config, parts, f"{prefix}.operator_norm", body.hidden),
        attention=_mixer(config, parts, layer),
        ffn_norm=_norm(config, parts, f"{prefix}.ffn_norm", body.hidden),
        ffn=feed_forward(config.ffn, parts, layer, mlp, router),
    )


def _mixer(config: Lfm2MoeConfig, parts: Parts, layer: int) -> GqaAttention | ShortConv:
    """Return the layer's attention or its convolution; each kind counts its own layers."""
    body, shape, prefix = config.body, config.attention, f"model.layers.{layer}"
    before = sum(full < layer for full in config.full)
    if layer not in config.full:
        conv = layer - before, body.hidden, config.kernel, config.conv_bias
        return ShortConv(*conv, parts, f"{prefix}.conv")
    name = f"{prefix}.self_attn"
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def linear(which: str, out_features: int, in_features: int) -> Linear:
        return parts.linear(f"{name}.{which}", out_features, in_features)

    return GqaAttention(
        before,
        shape,
        Projections(
            linear("q_proj", wide, body.hidden),
            linear("k_proj", narrow, body.hidden),
            linear("v_proj", narrow, body.hidden),
            linear("out_proj", body.hidden, wide),
            parts.tuned,
        ),
        q_norm=HeadNorm(_norm(config, parts, f"{name}.q_layernorm", shape.head_dim)),
        k_norm=HeadNorm(_norm(config, parts, f"{name}.k_layernorm", shape.head_dim)),
    )


def _norm(config: Lfm2MoeConfig, parts: Parts, name: str, width: int) -> RmsNorm:
    return RmsNorm(parts.tensor(f"{name}.weight", width), config.body.norm_eps)


def expert(name: str, config: Lfm2MoeConfig) -> ExpertPart | None:
    """See base.Family."""
    return _EXPERTS.part(name, config.ffn.sparse_layers, config.moe.experts)


def rename(name: str) -> str:
    """Return a dense tensor's name with the usual words."""
    for theirs, ours in _RENAMED.items():
        name = name.replace(theirs, ours)
    return name


FAMILY = Family("lfm2_moe", parse, build, expert, ignores_buffers, rename=rename)
