"""Kimi-Linear: three layers of Kimi Delta Attention to one of latent attention without rope.

Math as in transformers 5.23, modeling_kimi_linear.py. The experts are DeepSeek-V3's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moeinf.models.base import ExpertPart, Family, Model, MoeShape, Parts
from moeinf.models.config import MAX_LAYERS, Fields, require
from moeinf.models.expert_names import BLOCK_SPARSE_EXPERTS, is_layer
from moeinf.models.layers.decoder import Block, BodyConfig, Decoder, parse_body
from moeinf.models.layers.delta_net import DeltaShape
from moeinf.models.layers.kimi_delta import KimiDelta, parse_kimi_delta
from moeinf.models.layers.mla import MlaAttention, MlaShape, parse_mla
from moeinf.models.layers.norms import RmsNorm
from moeinf.models.layers.rope import STILL, without_rope
from moeinf.models.layers.sigmoid_experts import (
    SigmoidExperts,
    parse_mlp_types,
    parse_sigmoid_experts,
    sigmoid_ffn,
    sigmoid_ignores,
)

_LINEAR, _FULL = "linear_attention", "full_attention"
_SPELLINGS = {  # of published files -> of DeepSeek-V3
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}


@dataclass(frozen=True)
class KimiLinearConfig:
    """The checked values of config.json."""

    body: BodyConfig
    attention: MlaShape
    delta: DeltaShape
    full: tuple[int, ...]  # the layers with latent attention, ascending
    ffn: SigmoidExperts

    def __post_init__(self) -> None:
        require(len(self.full) > 0, "no layer has full attention")

    @property
    def moe(self) -> MoeShape:
        return self.ffn.plan.moe


def parse(values: Mapping[str, Any]) -> KimiLinearConfig:
    """See base.Family. Keys for rope mean nothing here, because no layer has one."""
    values = without_rope(values)
    for theirs, ours in _SPELLINGS.items():
        if theirs in values:
            value = values.pop(theirs)
            agree = ours not in values or values[ours] == value
            require(agree, f"{theirs} disagrees with {ours}")
            values[ours] = value
    fields = Fields(values)
    fields.refuse("mla_use_nope", True)
    fields.refuse("moe_layer_freq", 1)
    fields.refuse("tie_word_embeddings", False)  # transformers has no tied head for it
    fields.choice("moe_router_activation_func", default="sigmoid", known=("sigmoid",))
    body = replace(parse_body(fields, default_theta=1e4, default_eps=1e-5), rope=STILL)
    fields.expect("num_key_value_heads")
    fields.refuse("num_key_value_heads", body.heads)
    sparse = parse_mlp_types(fields, body.layers)
    return KimiLinearConfig(
        body=body,
        attention=parse_mla(fields, body.heads, body.rope),
        delta=parse_kimi_delta(fields, default_heads=32),
        full=_full_layers(fields, body.layers),
        ffn=parse_sigmoid_experts(fields, body, sparse, default_scale=2.446),
    )


def _full_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return the layers with full attention: of layer_types, of linear_attn_config, or by rule."""
    types = fields.words("layer_types", known=(_LINEAR, _FULL), count=layers)
    if types is not None:
        return tuple(layer for layer, word in enumerate(types) if word == _FULL)
    inner = fields.section("linear_attn_config")
    if inner is None or not (inner.has("full_attn_layers") and inner.has("kda_layers")):
        return tuple(range(4, layers, 4))
    full, delta = (
        inner.integers(name, low=1, high=MAX_LAYERS) for name in ("full_attn_layers", "kda_layers")
    )
    all_layers = list(range(1, layers + 1))
    require(sorted(full + delta) == all_layers, "linear_attn_config needs every layer once")
    return tuple(sorted(layer - 1 for layer in full))


def build(config: KimiLinearConfig, parts: Parts) -> Model:
    """See base.Family."""
    body, shape = config.body, config.attention
    blocks = [_block(config, parts, layer) for layer in range(body.layers)]
    recurrent = body.layers - len(config.full)
    memory = config.delta.memory(recurrent) if recurrent else None
    return Decoder(body, config.moe, shape.planes, shape.rope, blocks, parts, memory)


def _block(config: KimiLinearConfig, parts: Parts, layer: int) -> Block:
    body, prefix = config.body, f"model.layers.{layer}"

    def norm(name: str) -> RmsNorm:
        return RmsNorm(parts.tensor(f"{prefix}.{name}.weight", body.hidden), body.norm_eps)

    return Block(
        attention_norm=norm("input_layernorm"),
        attention=_attention(config, parts, layer),
        ffn_norm=norm("post_attention_layernorm"),
        ffn=sigmoid_ffn(config.ffn, parts, layer, f"{prefix}.mlp"),
    )


def _attention(config: KimiLinearConfig, parts: Parts, layer: int) -> MlaAttention | KimiDelta:
    """Return the layer's attention of either kind; each kind counts its own layers."""
    body, prefix = config.body, f"model.layers.{layer}.self_attn"
    before = sum(full < layer for full in config.full)
    if layer in config.full:
        return MlaAttention(before, config.attention, body.hidden, parts, prefix)
    return KimiDelta(layer - before, config.delta, body.hidden, body.norm_eps, parts, prefix)


def expert(name: str, config: KimiLinearConfig) -> ExpertPart | None:
    """See base.Family. Experts of layers for multi-token prediction are not loaded."""
    if is_layer(name, config.ffn.extra_layers):
        return None
    plan = config.ffn.plan
    return BLOCK_SPARSE_EXPERTS.part(name, plan.sparse_layers, plan.moe.experts)


def ignores(name: str, config: KimiLinearConfig) -> bool:
    """See base.Family."""
    return sigmoid_ignores(rename(name), config)


def rename(name: str) -> str:
    """Return a dense tensor's name with `mlp`; transformers writes the other for any layer."""
    return name.replace(".block_sparse_moe.", ".mlp.")


FAMILY = Family("kimi_linear", parse, build, expert, ignores, rename=rename)
