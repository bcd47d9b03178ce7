"""Qwen3-MoE: query and key norms per head, renormalised routing, optional dense layers.

Does not know where weights come from. Math as in transformers 5.23, modeling_qwen3_moe.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from moeinf.models.attention import GqaAttention, GqaShape, gqa_projections, parse_gqa
from moeinf.models.base import ExpertPart, Experts, Family, Model, MoeShape, Parts, Role
from moeinf.models.config import MAX_CONTEXT, MAX_LAYERS, MAX_WIDTH, Fields
from moeinf.models.decoder import Block, BodyConfig, Decoder, ignores_buffers, parse_body
from moeinf.models.expert_names import expert_part, expert_pattern
from moeinf.models.ffn import gated_mlp
from moeinf.models.moe import SparseFfn, parse_moe
from moeinf.models.norms import HeadNorm, RmsNorm
from moeinf.models.routing import SoftmaxRouter

_ROLES: Mapping[str, Role] = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
_EXPERT = expert_pattern("model.layers.{layer}.mlp.experts.{expert}.{role}.weight", _ROLES)


@dataclass(frozen=True)
class Qwen3MoeConfig:
    """config.json, checked."""

    body: BodyConfig
    attention: GqaShape
    moe: MoeShape
    sparse_layers: tuple[int, ...]  # the layers that have experts
    dense_intermediate: int | None  # of the others; None where there are none
    renormalise: bool  # norm_topk_prob


def parse(values: Mapping[str, Any]) -> Qwen3MoeConfig:
    """See base.Family. A sliding window is supported; it counts only with use_sliding_window."""
    fields = Fields(values)
    body = parse_body(fields, default_theta=1e4, default_eps=1e-6)
    window = fields.optional_integer("sliding_window", high=MAX_CONTEXT)
    shape = replace(
        parse_gqa(fields, body.hidden, body.heads),
        bias=fields.flag("attention_bias"),
        window=window if fields.flag("use_sliding_window") else None,
    )
    step = fields.integer("decoder_sparse_step", high=MAX_LAYERS, default=1)
    dense = set(fields.integers("mlp_only_layers", high=MAX_LAYERS))
    sparse = tuple(n for n in range(step - 1, body.layers, step) if n not in dense)
    any_dense = len(sparse) < body.layers
    return Qwen3MoeConfig(
        body=body,
        attention=shape,
        moe=parse_moe(fields, len(sparse), body.hidden, "moe_intermediate_size"),
        sparse_layers=sparse,
        dense_intermediate=(
            fields.integer("intermediate_size", high=MAX_WIDTH) if any_dense else None
        ),
        renormalise=fields.flag("norm_topk_prob"),
    )


def build(config: Qwen3MoeConfig, parts: Parts) -> Model:
    """See base.Family."""
    shape = config.attention
    blocks = [_block(config, parts, layer) for layer in range(config.body.layers)]
    return Decoder(config.body, config.moe, shape.planes, shape.head_dim, blocks, parts)


def _block(config: Qwen3MoeConfig, parts: Parts, layer: int) -> Block:
    body, shape, prefix = config.body, config.attention, f"model.layers.{layer}"
    attention = f"{prefix}.self_attn"

    def norm(name: str, width: int) -> RmsNorm:
        return RmsNorm(parts.tensor(f"{name}.weight", width), body.norm_eps)

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
        ffn=_ffn(config, parts, layer, f"{prefix}.mlp"),
    )


def _ffn(
    config: Qwen3MoeConfig, parts: Parts, layer: int, prefix: str
) -> Callable[[Tensor, Experts], Tensor]:
    moe = config.moe
    if layer in config.sparse_layers:
        gate = parts.tensor(f"{prefix}.gate.weight", moe.experts, moe.hidden)
        router = SoftmaxRouter(gate, moe.top_k, config.renormalise)
        return SparseFfn(config.sparse_layers.index(layer), router)
    assert config.dense_intermediate is not None
    mlp = gated_mlp(parts, prefix, moe.hidden, config.dense_intermediate)
    return lambda x, experts: mlp(x)


def expert(name: str, config: Qwen3MoeConfig) -> ExpertPart | None:
    """See base.Family."""
    return expert_part(name, _EXPERT, _ROLES, config.sparse_layers, config.moe.experts)


def ignores(name: str, config: Qwen3MoeConfig) -> bool:
    """See base.Family."""
    return ignores_buffers(name, config.body.tied_embeddings)


FAMILY = Family("qwen3_moe", parse, build, expert, ignores)
