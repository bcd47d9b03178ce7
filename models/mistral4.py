"""Mistral Small 4: latent attention with scaled queries, softmax routing, a shared expert.

Math as in transformers 5.23, modeling_mistral4.py, for text alone. Published models are inside a
model with vision (model_type mistral3), whose other parts are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from moeinf.models import quantisation
from moeinf.models.base import ExpertPart, Family, FusedPart, Model, ModelDataError, MoeShape, Parts
from moeinf.models.config import MAX_CONTEXT, MAX_EXPERTS, MAX_LAYERS, Fields
from moeinf.models.expert_names import MLP_EXPERTS, known_layer
from moeinf.models.layers.decoder import Block, BodyConfig, Decoder, ignores_buffers, parse_body
from moeinf.models.layers.feed_forward import FfnPlan, feed_forward, parse_ffn, shared_experts
from moeinf.models.layers.ffn import GatedMlp
from moeinf.models.layers.mla import MlaAttention, MlaShape, PositionScale, parse_mla
from moeinf.models.layers.norms import RmsNorm
from moeinf.models.layers.routing import BiasedSoftmaxRouter, SoftmaxRouter, require_groups

_FUSED = re.compile(
    r"model\.layers\.(0|[1-9][0-9]{0,8})\.mlp\.experts\.(gate_up|down)_proj(?:\.weight)?"
)
_ROLES: Mapping[str, Literal["gate_up", "down"]] = {"gate_up": "gate_up", "down": "down"}
_INNER = re.compile(r"language_model\.model\.|model\.language_model\.")
_ASIDE = re.compile(r"(?:model\.)?(?:vision_tower|multi_modal_projector)\.")
_ROPE = {  # for a config without a rope section
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


@dataclass(frozen=True)
class Mistral4Config:
    """The checked values of config.json."""

    body: BodyConfig
    attention: MlaShape
    scaling: PositionScale
    ffn: FfnPlan
    shared_experts: int
    groups: tuple[int, int] | None  # n_group, topk_group
    renormalise: bool  # norm_topk_prob
    scale: float  # routed_scaling_factor

    @property
    def moe(self) -> MoeShape:
        return self.ffn.moe


def parse(values: Mapping[str, Any]) -> Mistral4Config:
    """See base.Family. Only interleaved rope, as the published checkpoint has it."""
    if not values.get("rope_scaling") and values.get("rope_parameters") is None:
        values = {**values, "rope_scaling": None, "rope_parameters": _ROPE}
    fields = Fields(values)
    fields.refuse_null("rope_interleave", "n_group", "topk_group")
    fields.refuse("rope_interleave", True)
    share = _share(fields)
    body = parse_body(fields, default_theta=1e4, default_eps=1e-6, default_partial=share)
    fields.expect("num_key_value_heads")
    fields.refuse("num_key_value_heads", body.heads)
    rope = fields.section("rope_scaling") or fields.section("rope_parameters") or Fields({})
    rope.refuse("partial_rotary_factor", share)
    first = fields.integer("first_k_dense_replace", low=0, high=MAX_LAYERS, default=0)
    ffn = parse_ffn(fields, range(first, body.layers), body.layers, body.hidden)
    groups = (
        fields.integer("n_group", high=MAX_EXPERTS, default=1),
        fields.integer("topk_group", high=MAX_EXPERTS, default=1),
    )
    require_groups(*groups, ffn.moe.experts, ffn.moe.top_k)
    return Mistral4Config(
        body=body,
        attention=parse_mla(fields, body.heads, body.rope),
        scaling=PositionScale(
            rope.number("llama_4_scaling_beta", low=0.0, high=1e3),
            rope.integer("original_max_position_embeddings", high=MAX_CONTEXT),
        ),
        ffn=ffn,
        shared_experts=fields.integer("n_shared_experts", low=0, high=1024, default=1),
        groups=None if groups == (1, 1) else groups,
        renormalise=fields.flag("norm_topk_prob", default=True),
        scale=fields.number("routed_scaling_factor", low=1e-3, high=1e3, default=1.0),
    )


def _share(fields: Fields) -> float:
    """Return the share of a head that rotates."""
    nope = fields.integer("qk_nope_head_dim", high=1 << 20)
    rotated = fields.integer("qk_rope_head_dim", high=1 << 20)
    return rotated / (nope + rotated)


def parse_inner(values: Mapping[str, Any]) -> Mistral4Config:
    """See base.Family. The keys of the text part are in text_config."""
    inner = Fields(values).section("text_config")
    if inner is None or not inner.is_word("model_type", "mistral4"):
        raise ModelDataError(
            "config.json: mistral3 is supported with a text_config of mistral4 only"
        )
    above = ("tie_word_embeddings", *quantisation.KEYS)
    outer = {key: values[key] for key in above if key in values}
    return parse({**values["text_config"], **outer})


def build(config: Mistral4Config, parts: Parts) -> Model:
    """See base.Family."""
    shape = config.attention
    blocks = [_block(config, parts, layer) for layer in range(config.body.layers)]
    return Decoder(config.body, config.moe, shape.planes, shape.rope, blocks, parts)


def _block(config: Mistral4Config, parts: Parts, layer: int) -> Block:
    body, moe, prefix = config.body, config.moe, f"model.layers.{layer}"
    mlp = f"{prefix}.mlp"

    def norm(name: str) -> RmsNorm:
        return RmsNorm(parts.tensor(f"{prefix}.{name}.weight", body.hidden), body.norm_eps)

    def router() -> SoftmaxRouter | BiasedSoftmaxRouter:
        gate = parts.tensor(f"{mlp}.gate.weight", moe.experts, moe.hidden)
        if config.groups is None:
            return SoftmaxRouter(gate, moe.top_k, config.renormalise, config.scale)
        rest = moe.top_k, config.renormalise, config.scale, config.groups
        return BiasedSoftmaxRouter(gate, torch.zeros_like(gate[:, 0]), *rest)

    def shared() -> GatedMlp | None:
        return shared_experts(parts, mlp, moe, config.shared_experts)

    return Block(
        attention_norm=norm("input_layernorm"),
        attention=MlaAttention(
            layer, config.attention, body.hidden, parts, f"{prefix}.self_attn", config.scaling
        ),
        ffn_norm=norm("post_attention_layernorm"),
        ffn=feed_forward(config.ffn, parts, layer, mlp, router, shared),
    )


def expert(name: str, config: Mistral4Config) -> ExpertPart | None:
    """See base.Family."""
    if _ASIDE.match(name) or fused(name, config) is not None:
        return None
    return MLP_EXPERTS.part(rename(name), config.ffn.sparse_layers, config.moe.experts)


def fused(name: str, config: Mistral4Config) -> FusedPart | None:
    """See base.Family. Raises ModelDataError for a layer that the config does not have."""
    match = _FUSED.fullmatch(rename(name))
    if match is None:
        return None
    layer = known_layer(name, match[1], config.body.layers)
    if layer not in config.ffn.sparse_layers:
        raise ModelDataError(f"{name!r}: layer {layer} is dense")
    return FusedPart(config.ffn.sparse_layers.index(layer), _ROLES[match[2]])


def ignores(name: str, config: Mistral4Config) -> bool:
    """See base.Family."""
    return _ASIDE.match(name) is not None or ignores_buffers(rename(name), config)


def rename(name: str) -> str:
    """Return a tensor's name as in a model of text alone."""
    return _INNER.sub("model.", name, count=1).replace("language_model.lm_head.", "lm_head.")


FAMILY = Family("mistral4", parse, build, expert, ignores, fused, rename)
INNER = Family("mistral4", parse_inner, build, expert, ignores, fused, rename)
