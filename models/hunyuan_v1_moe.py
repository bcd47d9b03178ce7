"""Hunyuan-A13B: norms of each head after rope, softmax routing, a shared network in every layer.

Math as in transformers 5.23, modeling_hunyuan_v1_moe.py. A config with one value per layer is read
if all layers have the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moeinf.models.base import ExpertPart, Family, Model, MoeShape, Parts
from moeinf.models.config import Fields
from moeinf.models.expert_names import MLP_EXPERTS
from moeinf.models.layers.attention import (
    GqaAttention,
    GqaShape,
    NormAfterRopeCore,
    gqa_projections,
    parse_gqa,
)
from moeinf.models.layers.decoder import Block, BodyConfig, Decoder, ignores_buffers, parse_body
from moeinf.models.layers.ffn import gated_mlp
from moeinf.models.layers.moe import SparseFfn, parse_moe
from moeinf.models.layers.norms import HeadNorm, RmsNorm
from moeinf.models.layers.routing import SoftmaxRouter

_PER_LAYER = ("num_experts", "moe_topk", "num_shared_expert", "moe_intermediate_size")


@dataclass(frozen=True)
class HunyuanMoeConfig:
    """The checked values of config.json."""

    body: BodyConfig
    attention: GqaShape
    moe: MoeShape


def parse(values: Mapping[str, Any]) -> HunyuanMoeConfig:
    """See base.Family. Keys of the first published code are refused unless they change nothing."""
    values = {
        key: _of_all_layers(value) if key in _PER_LAYER else value for key, value in values.items()
    }
    fields = Fields(values)
    for key in ("use_qk_norm", "norm_topk_prob", "use_mixed_mlp_moe"):
        fields.refuse(key, True)
    for key in ("use_cla", "use_mla", "mlp_bias", "position_embedding_xdrope"):
        fields.refuse(key, False)
    fields.refuse("group_limited_greedy", False)
    fields.refuse("moe_layer_num_skipped", 0)
    fields.refuse("norm_type", "rms")
    fields.refuse("num_shared_expert", 1)
    plain, alpha = _without_alpha(values)
    body = parse_body(Fields(plain), default_theta=1e4, default_eps=1e-5)
    shape = parse_gqa(fields, body.hidden, body.heads)
    fields.refuse("attention_head_dim", shape.head_dim)
    moe = parse_moe(fields, body.layers, body.hidden, "intermediate_size")
    fields.refuse("moe_intermediate_size", moe.intermediate)
    return HunyuanMoeConfig(
        body=replace(body, rope=replace(body.rope, alpha=alpha)),
        attention=replace(shape, bias=fields.flag("attention_bias")),
        moe=moe,
    )


def _of_all_layers(value: Any) -> Any:
    """Return the one value of a list; the list itself if it has several."""
    same = isinstance(value, list) and value and all(item == value[0] for item in value)
    return value[0] if same else value


def _without_alpha(values: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """Return the config with plain rope in place of a `dynamic` one with alpha, and alpha."""
    for name in ("rope_scaling", "rope_parameters"):
        rope = Fields(values).section(name)
        if rope is None:
            continue
        if not rope.has("alpha") or not any(
            rope.is_word(key, "dynamic") for key in ("rope_type", "type")
        ):
            break
        rope.expect("factor")
        theta = {"rope_theta": values[name]["rope_theta"]} if rope.has("rope_theta") else {}
        return {**values, name: theta or None}, rope.number("alpha", low=1.0, high=1e6)
    return dict(values), 1.0


def build(config: HunyuanMoeConfig, parts: Parts) -> Model:
    """See base.Family."""
    shape = config.attention
    blocks = [_block(config, parts, layer) for layer in range(config.body.layers)]
    return Decoder(config.body, config.moe, shape.planes, shape.head_dim, blocks, parts)


def _block(config: HunyuanMoeConfig, parts: Parts, layer: int) -> Block:
    body, shape, moe = config.body, config.attention, config.moe
    prefix = f"model.layers.{layer}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"

    def norm(name: str, width: int) -> RmsNorm:
        return RmsNorm(parts.tensor(f"{name}.weight", width), body.norm_eps)

    gate = parts.tensor(f"{mlp}.gate.wg.weight", moe.experts, moe.hidden)
    return Block(
        attention_norm=norm(f"{prefix}.input_layernorm", body.hidden),
        attention=GqaAttention(
            layer,
            shape,
            gqa_projections(parts, attention, body.hidden, shape),
            q_norm=HeadNorm(norm(f"{attention}.query_layernorm", shape.head_dim)),
            k_norm=HeadNorm(norm(f"{attention}.key_layernorm", shape.head_dim)),
            core=NormAfterRopeCore,
        ),
        ffn_norm=norm(f"{prefix}.post_attention_layernorm", body.hidden),
        ffn=SparseFfn(
            layer,
            SoftmaxRouter(gate, moe.top_k, renormalise=True),
            gated_mlp(parts, f"{mlp}.shared_mlp", body.hidden, moe.intermediate),
        ),
    )


def expert(name: str, config: HunyuanMoeConfig) -> ExpertPart | None:
    """See base.Family."""
    return MLP_EXPERTS.part(name, range(config.body.layers), config.moe.experts)


FAMILY = Family("hunyuan_v1_moe", parse, build, expert, ignores_buffers)
