"""DeepSeek-V3 and R1: latent attention, experts chosen by sigmoid scores within groups.

Math as in transformers 5.23, modeling_deepseek_v3.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from moeinf.models.base import Family, Model, MoeShape, Parts
from moeinf.models.config import MAX_LAYERS, Fields
from moeinf.models.layers.decoder import Block, BodyConfig, Decoder, parse_body
from moeinf.models.layers.kv_cache import PassRows
from moeinf.models.layers.mla import MlaAttention, MlaShape, parse_mla
from moeinf.models.layers.mtp import MtpModules, behind, mtp_family
from moeinf.models.layers.norms import RmsNorm
from moeinf.models.layers.sigmoid_experts import (
    SigmoidExperts,
    of_modules,
    parse_sigmoid_experts,
    sigmoid_expert,
    sigmoid_ffn,
    sigmoid_ignores,
)


@dataclass(frozen=True)
class DeepseekV3Config:
    """The checked values of config.json."""

    body: BodyConfig
    attention: MlaShape
    ffn: SigmoidExperts

    @property
    def moe(self) -> MoeShape:
        return self.ffn.plan.moe


def parse(values: Mapping[str, Any]) -> DeepseekV3Config:
    """See base.Family. Only interleaved rope, as all published checkpoints have it."""
    fields = Fields(values)
    body = parse_body(fields, default_theta=1e4, default_eps=1e-6)
    fields.refuse_null("rope_interleave")
    fields.refuse("rope_interleave", True)
    fields.expect("num_key_value_heads")
    fields.refuse("num_key_value_heads", body.heads)
    fields.refuse("moe_layer_freq", 1)
    first = fields.integer("first_k_dense_replace", low=0, high=MAX_LAYERS, default=3)
    return DeepseekV3Config(
        body=body,
        attention=parse_mla(fields, body.heads, body.rope),
        ffn=parse_sigmoid_experts(
            fields, body, range(first, body.layers), default_scale=2.5, default_groups=(8, 4)
        ),
    )


def build(config: DeepseekV3Config, parts: Parts) -> Model:
    """See base.Family."""
    shape = config.attention
    blocks = [_block(config, parts, layer) for layer in range(config.body.layers)]
    return Decoder(config.body, config.moe, shape.planes, shape.rope, blocks, parts)


def _block(config: DeepseekV3Config, parts: Parts, layer: int) -> Block:
    prefix, hidden = f"model.layers.{layer}.self_attn", config.body.hidden
    attention = MlaAttention(layer, config.attention, hidden, parts, prefix)
    return block(config, parts, layer, attention)


def block(
    config: DeepseekV3Config,
    parts: Parts,
    layer: int,
    attention: Callable[[Tensor, PassRows], Tensor],
) -> Block:
    """Return layer `layer` with its attention."""
    body, prefix = config.body, f"model.layers.{layer}"

    def norm(name: str) -> RmsNorm:
        return RmsNorm(parts.tensor(f"{prefix}.{name}.weight", body.hidden), body.norm_eps)

    return Block(
        attention_norm=norm("input_layernorm"),
        attention=attention,
        ffn_norm=norm("post_attention_layernorm"),
        ffn=sigmoid_ffn(config.ffn, parts, layer, f"{prefix}.mlp"),
    )


def mtp(config: DeepseekV3Config) -> Family | None:
    """See base.Family."""
    extra = config.ffn.extra_layers
    if not extra:
        return None
    body = replace(config.body, layers=len(extra))
    own = replace(config, body=body, ffn=of_modules(config.ffn))
    return mtp_family("deepseek_v3", own, build_mtp, behind(extra), sigmoid_expert)


def build_mtp(config: DeepseekV3Config, parts: Parts) -> MtpModules:
    """Build the modules of multi-token prediction, from the config that `mtp` makes."""
    blocks = [_block(config, parts, layer) for layer in range(config.body.layers)]
    shape = config.attention
    return MtpModules(config.body, config.moe, shape.planes, shape.rope, blocks, parts)


FAMILY = Family("deepseek_v3", parse, build, sigmoid_expert, sigmoid_ignores, mtp=mtp)
