"""MiniMax-M2 and M2.5: norms over whole projections, half a head rotates, sigmoid routing.

Math as in transformers 5.23, modeling_minimax_m2.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moeinf.models.base import ExpertPart, Family, Model, MoeShape, Parts
from moeinf.models.config import MAX_LAYERS, MAX_WIDTH, Fields, require
from moeinf.models.expert_names import BLOCK_SPARSE_EXPERTS, is_layer
from moeinf.models.layers.attention import GqaAttention, GqaShape, gqa_projections, parse_gqa
from moeinf.models.layers.decoder import Block, BodyConfig, Decoder, ignores_buffers, parse_body
from moeinf.models.layers.moe import SparseFfn, parse_moe
from moeinf.models.layers.norms import RmsNorm
from moeinf.models.layers.routing import SigmoidRouter


@dataclass(frozen=True)
class MinimaxM2Config:
    """The checked values of config.json."""

    body: BodyConfig
    attention: GqaShape
    moe: MoeShape
    extra_layers: range  # of multi-token prediction


def parse(values: Mapping[str, Any]) -> MinimaxM2Config:
    """See base.Family. rotary_dim is an older spelling of partial_rotary_factor."""
    fields = Fields(values)
    fields.refuse("use_qk_norm", True)
    fields.refuse("use_routing_bias", True)
    fields.refuse("shared_intermediate_size", 0)
    fields.choice("qk_norm_type", default="per_layer", known=("per_layer",))
    fields.choice("scoring_func", default="sigmoid", known=("sigmoid",))
    head_dim = fields.integer("head_dim", high=MAX_WIDTH, default=128)
    rotated = fields.optional_integer("rotary_dim", high=MAX_WIDTH) or head_dim
    require(rotated <= head_dim, f"rotary_dim {rotated} is above head_dim {head_dim}")
    body = parse_body(
        fields, default_theta=5e6, default_eps=1e-6, default_partial=rotated / head_dim
    )
    extra = fields.integer("num_mtp_modules", low=0, high=MAX_LAYERS, default=0)
    return MinimaxM2Config(
        body=body,
        attention=parse_gqa(fields, body.hidden, body.heads, default_head_dim=128),
        moe=parse_moe(fields, body.layers, body.hidden, "intermediate_size"),
        extra_layers=range(body.layers, body.layers + extra),
    )


def build(config: MinimaxM2Config, parts: Parts) -> Model:
    """See base.Family."""
    body, shape = config.body, config.attention
    blocks = [_block(config, parts, layer) for layer in range(body.layers)]
    turning = body.rope.turning(shape.head_dim)
    return Decoder(body, config.moe, shape.planes, turning, blocks, parts)


def _block(config: MinimaxM2Config, parts: Parts, layer: int) -> Block:
    body, shape, moe = config.body, config.attention, config.moe
    prefix = f"model.layers.{layer}"
    attention, sparse = f"{prefix}.self_attn", f"{prefix}.block_sparse_moe"

    def norm(name: str, width: int) -> RmsNorm:
        return RmsNorm(parts.tensor(f"{name}.weight", width), body.norm_eps)

    return Block(
        attention_norm=norm(f"{prefix}.input_layernorm", body.hidden),
        attention=GqaAttention(
            layer,
            shape,
            gqa_projections(parts, attention, body.hidden, shape),
            q_norm=norm(f"{attention}.q_norm", shape.heads * shape.head_dim),
            k_norm=norm(f"{attention}.k_norm", shape.kv_heads * shape.head_dim),
        ),
        ffn_norm=norm(f"{prefix}.post_attention_layernorm", body.hidden),
        ffn=SparseFfn(
            layer,
            SigmoidRouter(
                parts.tensor(f"{sparse}.gate.weight", moe.experts, moe.hidden),
                parts.tensor(f"{sparse}.e_score_correction_bias", moe.experts),
                moe.top_k,
                renormalise=True,
            ),
        ),
    )


def expert(name: str, config: MinimaxM2Config) -> ExpertPart | None:
    """See base.Family. Experts of the extra layers are not loaded."""
    if is_layer(name, config.extra_layers):
        return None
    return BLOCK_SPARSE_EXPERTS.part(name, range(config.body.layers), config.moe.experts)


def ignores(name: str, config: MinimaxM2Config) -> bool:
    """See base.Family."""
    return is_layer(name, config.extra_layers) or ignores_buffers(name, config)


FAMILY = Family("minimax_m2", parse, build, expert, ignores)
