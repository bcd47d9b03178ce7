"""Decoders of grouped-query attention and of experts chosen by sigmoid scores.

GLM-4.5, dots.llm1, EXAONE-MoE and Solar-Open differ in their configs only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moeinf.models.base import Family, Model, MoeShape, Parts
from moeinf.models.layers.attention import (
    GqaAttention,
    GqaCore,
    GqaShape,
    NoRopeCore,
    gqa_projections,
)
from moeinf.models.layers.decoder import Block, BodyConfig, Decoder
from moeinf.models.layers.mtp import MtpModules, behind, mtp_family
from moeinf.models.layers.norms import HeadNorm, RmsNorm
from moeinf.models.layers.sigmoid_experts import (
    SigmoidExperts,
    of_modules,
    sigmoid_expert,
    sigmoid_ffn,
)


@dataclass(frozen=True)
class SigmoidGqaConfig:
    """The checked values of config.json."""

    body: BodyConfig
    attention: tuple[GqaShape, ...]  # one per layer; they differ in their windows
    turning: int  # dimensions of a head that rotate
    head_norms: bool  # norms of each head of q and k
    ffn: SigmoidExperts
    still: frozenset[int] = frozenset()  # layers without rope

    @property
    def moe(self) -> MoeShape:
        return self.ffn.plan.moe


def build(config: SigmoidGqaConfig, parts: Parts) -> Model:
    """See base.Family."""
    blocks = [_block(config, parts, layer) for layer in range(config.body.layers)]
    planes = config.attention[0].planes
    return Decoder(config.body, config.moe, planes, config.turning, blocks, parts)


def mtp(model_type: str, config: SigmoidGqaConfig) -> Family | None:
    """Return the family of the modules of multi-token prediction: see base.Family."""
    extra = config.ffn.extra_layers
    if not extra:
        return None
    own = replace(
        config,
        body=replace(config.body, layers=len(extra)),
        attention=config.attention[-1:] * len(extra),
        ffn=of_modules(config.ffn),
    )
    return mtp_family(model_type, own, build_mtp, behind(extra), sigmoid_expert)


def build_mtp(config: SigmoidGqaConfig, parts: Parts) -> MtpModules:
    """Build the modules of multi-token prediction, from the config that `mtp` makes."""
    blocks = [_block(config, parts, layer) for layer in range(config.body.layers)]
    planes = config.attention[0].planes
    return MtpModules(config.body, config.moe, planes, config.turning, blocks, parts)


def _block(config: SigmoidGqaConfig, parts: Parts, layer: int) -> Block:
    body, shape, prefix = config.body, config.attention[layer], f"model.layers.{layer}"
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
            core=NoRopeCore if layer in config.still else GqaCore,
        ),
        ffn_norm=norm(f"{prefix}.post_attention_layernorm", body.hidden),
        ffn=sigmoid_ffn(config.ffn, parts, layer, f"{prefix}.mlp"),
    )
