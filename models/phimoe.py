"""Phi-3.5-MoE: LayerNorm, biases everywhere, two experts chosen by the sparse mixer, longrope.

Math as in transformers 5.23, modeling_phimoe.py, with one difference. Texts beyond the original
context rotate by the long factors, which that file never uses.
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
from moeinf.models.layers.norms import layer_norm
from moeinf.models.layers.routing import SparseMixer


@dataclass(frozen=True)
class PhimoeConfig:
    """The checked values of config.json."""

    body: BodyConfig
    attention: GqaShape
    moe: MoeShape
    jitter: float  # router_jitter_noise

    def __post_init__(self) -> None:
        require(self.moe.top_k == 2, f"the sparse mixer chooses 2 experts, not {self.moe.top_k}")
        require(self.moe.experts >= 2, "the sparse mixer chooses 2 experts")
        require(
            not (self.body.tied_embeddings and self.body.head_bias),
            "lm_head_bias with tie_word_embeddings is not supported",
        )


def parse(values: Mapping[str, Any]) -> PhimoeConfig:
    """See base.Family. A sliding window is supported."""
    fields = Fields(values)
    body = parse_body(fields, default_theta=1e6, default_eps=1e-5)
    rope = body.rope
    require(
        rope.kind == "default" or None not in (rope.short_mscale, rope.long_mscale),
        "the rope section lacks short_mscale or long_mscale",
    )
    shape = replace(
        parse_gqa(fields, body.hidden, body.heads),
        bias=fields.flag("attention_bias"),
        window=fields.optional_integer("sliding_window", high=MAX_CONTEXT),
    )
    return PhimoeConfig(
        body=replace(body, layer_norm=True, head_bias=fields.flag("lm_head_bias")),
        attention=shape,
        moe=parse_moe(fields, body.layers, body.hidden, "intermediate_size"),
        jitter=fields.number("router_jitter_noise", low=0.0, high=1.0, default=0.01),
    )


def build(config: PhimoeConfig, parts: Parts) -> Model:
    """See base.Family."""
    shape = config.attention
    blocks = [_block(config, parts, layer) for layer in range(config.body.layers)]
    return Decoder(config.body, config.moe, shape.planes, shape.head_dim, blocks, parts)


def _block(config: PhimoeConfig, parts: Parts, layer: int) -> Block:
    body, moe, prefix = config.body, config.moe, f"model.layers.{layer}"
    gate = parts.tensor(f"{prefix}.block_sparse_moe.gate.weight", moe.experts, moe.hidden)
    projections = gqa_projections(parts, f"{prefix}.self_attn", body.hidden, config.attention)
    return Block(
        attention_norm=layer_norm(parts, f"{prefix}.input_layernorm", body.hidden, body.norm_eps),
        attention=GqaAttention(layer, config.attention, projections),
        ffn_norm=layer_norm(
            parts, f"{prefix}.post_attention_layernorm", body.hidden, body.norm_eps
        ),
        ffn=SparseFfn(layer, SparseMixer(gate, config.jitter)),
    )


def expert(name: str, config: PhimoeConfig) -> ExpertPart | None:
    """See base.Family."""
    return BLOCK_SPARSE_EXPERTS.part(name, range(config.body.layers), config.moe.experts)


FAMILY = Family("phimoe", parse, build, expert, ignores_buffers)
