"""gpt-oss: attention sinks, alternating windows, biases everywhere, clamped SwiGLU experts.

Math as in transformers 5.23, modeling_gpt_oss.py. The activation's limit is fixed in ffn.py and in
the kernels; a config with another limit is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from moeinf.models.base import (
    ExpertPart,
    Family,
    FusedPart,
    Model,
    MoeShape,
    Parts,
)
from moeinf.models.config import MAX_CONTEXT, Fields
from moeinf.models.expert_names import known_layer
from moeinf.models.layers.attention import GqaAttention, GqaShape, gqa_projections, parse_gqa
from moeinf.models.layers.decoder import Block, BodyConfig, Decoder, ignores_buffers, parse_body
from moeinf.models.layers.moe import SparseFfn, parse_moe
from moeinf.models.layers.norms import WideRmsNorm
from moeinf.models.layers.routing import TopSoftmaxRouter

_FUSED = re.compile(
    r"model\.layers\.(0|[1-9][0-9]{0,8})\.mlp\.experts\.(gate_up|down)_proj(_bias)?"
)
_ROLES: Mapping[str, Literal["gate_up", "down", "gate_up_bias", "down_bias"]] = {
    "gate_up": "gate_up", "down": "down", "gate_up_bias": "gate_up_bias", "down_bias": "down_bias",
}  # fmt: skip
_ROPE = {  # for a config without a rope section
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_WINDOWED, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class GptOssConfig:
    """The checked values of config.json."""

    body: BodyConfig
    attention: tuple[GqaShape, ...]  # one per layer
    moe: MoeShape


def parse(values: Mapping[str, Any]) -> GptOssConfig:
    """See base.Family."""
    if not values.get("rope_scaling") and values.get("rope_parameters") is None:
        values = {**values, "rope_scaling": None, "rope_parameters": _ROPE}
    fields = Fields(values)
    body = parse_body(fields, default_theta=150000.0, default_eps=1e-5)
    fields.refuse("swiglu_limit", 7.0, 7)
    shape = replace(
        parse_gqa(fields, body.hidden, body.heads, default_head_dim=64),
        bias=fields.flag("attention_bias", default=True),
    )
    fields.refuse_null("sliding_window")
    window = fields.integer("sliding_window", high=MAX_CONTEXT, default=128)
    kinds = fields.words("layer_types", known=(_WINDOWED, _FULL), count=body.layers)
    if kinds is None:
        kinds = tuple((_WINDOWED, _FULL)[layer % 2] for layer in range(body.layers))
    return GptOssConfig(
        body=replace(body, wide_norm=True),
        attention=tuple(
            replace(shape, window=window if kind == _WINDOWED else None) for kind in kinds
        ),
        moe=replace(
            parse_moe(fields, body.layers, body.hidden, "intermediate_size"),
            activation="clamped_swiglu",
            biased=True,
        ),
    )


def build(config: GptOssConfig, parts: Parts) -> Model:
    """See base.Family."""
    shape = config.attention[0]
    blocks = [_block(config, parts, layer) for layer in range(config.body.layers)]
    return Decoder(config.body, config.moe, shape.planes, shape.head_dim, blocks, parts)


def _block(config: GptOssConfig, parts: Parts, layer: int) -> Block:
    body, shape, moe = config.body, config.attention[layer], config.moe
    prefix = f"model.layers.{layer}"
    attention, router = f"{prefix}.self_attn", f"{prefix}.mlp.router"

    def norm(name: str) -> WideRmsNorm:
        return WideRmsNorm(parts.tensor(f"{prefix}.{name}.weight", body.hidden), body.norm_eps)

    return Block(
        attention_norm=norm("input_layernorm"),
        attention=GqaAttention(
            layer,
            shape,
            gqa_projections(parts, attention, body.hidden, shape),
            sinks=parts.tensor(f"{attention}.sinks", shape.heads),
        ),
        ffn_norm=norm("post_attention_layernorm"),
        ffn=SparseFfn(
            layer,
            TopSoftmaxRouter(
                parts.tensor(f"{router}.weight", moe.experts, moe.hidden),
                parts.tensor(f"{router}.bias", moe.experts),
                moe.top_k,
            ),
        ),
    )


def expert(name: str, config: GptOssConfig) -> ExpertPart | None:
    """See base.Family. No expert has a tensor of its own."""
    return None


def fused(name: str, config: GptOssConfig) -> FusedPart | None:
    """See base.Family. Raises ModelDataError for a layer that the config does not have."""
    match = _FUSED.fullmatch(name)
    if match is None:
        return None
    layer = known_layer(name, match[1], config.body.layers)
    role = _ROLES[match[2] + (match[3] or "")]
    return FusedPart(layer, role, transposed=True, interleaved=True)


FAMILY = Family("gpt_oss", parse, build, expert, ignores_buffers, fused)
