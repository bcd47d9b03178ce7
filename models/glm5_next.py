"""GLM-5.3-Flash: three layers of Kimi Delta Attention to one of sparse latent attention, no rope.

Math as in transformers 5.23, modeling_glm5_next.py, for text alone. Four residual streams are mixed
around every half of a layer (hyper_block.py). The vision part (model.visual) is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moeinf.models import quantisation
from moeinf.models.base import ExpertPart, Family, Model, MoeShape, Parts
from moeinf.models.config import MAX_CONTEXT, Fields, require
from moeinf.models.expert_names import is_layer
from moeinf.models.glm_moe_dsa import parse_indexed
from moeinf.models.layers.decoder import BodyConfig, Decoder, parse_body
from moeinf.models.layers.delta_net import DeltaShape
from moeinf.models.layers.hyper_block import (
    HyperBlock,
    HyperConnection,
    HyperShape,
    hyper_connection,
    mean_head,
    parse_hyper,
)
from moeinf.models.layers.indexer import IndexerShape, parse_indexer
from moeinf.models.layers.kimi_delta import KimiDelta, LogDecay, parse_kimi_delta
from moeinf.models.layers.mla import MlaAttention, MlaShape, parse_mla
from moeinf.models.layers.norms import RmsNorm
from moeinf.models.layers.pooled_indexer import PooledIndexer
from moeinf.models.layers.rope import STILL, without_rope
from moeinf.models.layers.sigmoid_experts import (
    SigmoidExperts,
    parse_mlp_types,
    parse_sigmoid_experts,
    sigmoid_expert,
    sigmoid_ffn,
    sigmoid_ignores,
)
from moeinf.models.layers.sparse_mla import SparseMlaAttention

_LINEAR = "linear_attention"
_FULL = ("full_attention", "indexed_attention", "deepseek_sparse_attention")  # all mean the same
_VISION = "model.visual."
_BOUND = -5.0


@dataclass(frozen=True)
class Glm5NextConfig:
    """The checked values of config.json."""

    body: BodyConfig
    attention: MlaShape
    indexer: IndexerShape
    delta: DeltaShape
    forgetting: LogDecay
    hyper: HyperShape
    full: tuple[int, ...]  # the layers with latent attention, ascending
    indexed: tuple[int, ...]  # those of them with an indexer; the others use the choice before
    ffn: SigmoidExperts

    def __post_init__(self) -> None:
        require(len(self.full) > 0, "no layer has attention")
        for layer in self.full:
            has = layer in self.indexed or layer - 1 in self.indexed
            require(has, f"indexer_types: the layer before layer {layer} has no indexer to use")

    @property
    def moe(self) -> MoeShape:
        return self.ffn.plan.moe


def parse(values: Mapping[str, Any]) -> Glm5NextConfig:
    """See base.Family. The keys are in text_config, or outside in a checkpoint of text alone."""
    values = without_rope(_text(values))
    fields = Fields(values)
    fields.refuse_null("swiglu_limit")
    fields.refuse("swiglu_limit", 10.0, 10)
    fields.refuse("qk_rope_head_dim", 0)
    fields.refuse("index_kpool_always_select_tail", True)
    fields.refuse("moe_layer_freq", 1)
    body = replace(parse_body(fields, default_theta=1e4, default_eps=1e-5), rope=STILL)
    fields.expect("num_key_value_heads")
    fields.refuse("num_key_value_heads", body.heads)
    shape = replace(parse_mla(fields, body.heads, body.rope, rotated=0), norm_eps=body.norm_eps)
    require(shape.q_lora is not None, "q_lora_rank = null is not supported with an indexer")
    full, all_indexed = _full_layers(fields, body.layers), parse_indexed(fields, body.layers)
    sparse = parse_mlp_types(fields, body.layers, default_dense=3)
    ffn = parse_sigmoid_experts(fields, body, sparse, default_scale=2.5)
    moe = replace(ffn.plan.moe, activation="swiglu10")
    pool = fields.integer("index_kpool", high=MAX_CONTEXT, default=16)
    return Glm5NextConfig(
        body=body,
        attention=shape,
        indexer=replace(parse_indexer(fields, 0, pairs=True, default_heads=32), pool=pool),
        delta=parse_kimi_delta(fields, default_heads=64),
        forgetting=LogDecay(_bound(values), flat=True),
        hyper=parse_hyper(fields, body.norm_eps),
        full=full,
        indexed=tuple(layer for layer in full if layer in all_indexed),
        ffn=replace(ffn, plan=replace(ffn.plan, moe=moe)),
    )


def _text(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of the text part."""
    if Fields(values).section("text_config") is None:
        return values
    above = ("tie_word_embeddings", *quantisation.KEYS)
    return {**values["text_config"], **{key: values[key] for key in above if key in values}}


def _bound(values: Mapping[str, Any]) -> float | None:
    """Return the bound of a channel's log-decay; linear_attn_config wins."""

    def read(
        fields: Fields, there: Mapping[str, Any], name: str, other: float | None
    ) -> float | None:
        bound = fields.optional_number(name, low=-1e3, high=0.0)
        return bound if name in there else other

    fields = Fields(values)
    bound = read(fields, values, "linear_lower_bound", _BOUND)
    inner = fields.section("linear_attn_config")
    if inner is None:
        return bound
    bound = read(inner, values["linear_attn_config"], "gate_lower_bound", bound)
    return _BOUND if bound is None and inner.flag("safe_gate", default=True) else bound


def _full_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return the layers with latent attention: layer_types names them, else each fourth is one."""
    types = fields.words("layer_types", known=(_LINEAR, *_FULL), count=layers)
    if types is None:
        return tuple(range(3, layers, 4))
    return tuple(layer for layer, word in enumerate(types) if word != _LINEAR)


def build(config: Glm5NextConfig, parts: Parts) -> Model:
    """See base.Family."""
    body, shape = config.body, config.attention
    recurrent = body.layers - len(config.full)
    return Decoder(
        body,
        config.moe,
        shape.planes,
        shape.rope,
        [_block(config, parts, layer) for layer in range(body.layers)],
        parts,
        config.delta.memory(recurrent) if recurrent else None,
        indexers=(2 * config.indexer.width,) * len(config.indexed),
        streams=config.hyper.streams,
        head=mean_head,
    )


def _block(config: Glm5NextConfig, parts: Parts, layer: int) -> HyperBlock:
    body, prefix = config.body, f"model.layers.{layer}"

    def norm(name: str) -> RmsNorm:
        return RmsNorm(parts.tensor(f"{prefix}.{name}.weight", body.hidden), body.norm_eps)

    def mix(name: str) -> HyperConnection:
        return hyper_connection(parts, f"{prefix}.{name}", config.hyper, body.hidden)

    return HyperBlock(
        attention_mix=mix("attn_hc"),
        attention_norm=norm("input_layernorm"),
        attention=_attention(config, parts, layer),
        ffn_mix=mix("ffn_hc"),
        ffn_norm=norm("post_attention_layernorm"),
        ffn=sigmoid_ffn(config.ffn, parts, layer, f"{prefix}.mlp"),
    )


def _attention(config: Glm5NextConfig, parts: Parts, layer: int) -> SparseMlaAttention | KimiDelta:
    """Return the layer's attention of either kind; each kind counts its own layers."""
    body, shape, prefix = config.body, config.attention, f"model.layers.{layer}.self_attn"
    before = sum(full < layer for full in config.full)
    if layer not in config.full:
        return KimiDelta(
            layer - before, config.delta, body.hidden, body.norm_eps, parts, prefix,
            config.forgetting,
        )  # fmt: skip
    indexer = None
    if layer in config.indexed:
        assert shape.q_lora is not None
        plane, name = len(config.full) + config.indexed.index(layer), f"{prefix}.indexer"
        indexer = PooledIndexer(plane, config.indexer, body.hidden, shape.q_lora, parts, name)
    lends = layer + 1 in config.full and layer + 1 not in config.indexed
    dense = MlaAttention(before, shape, body.hidden, parts, prefix)
    return SparseMlaAttention(dense, config.indexer, indexer, lends)


def expert(name: str, config: Glm5NextConfig) -> ExpertPart | None:
    """See base.Family. Experts of the layer for multi-token prediction are not loaded."""
    return None if name.startswith(_VISION) else sigmoid_expert(rename(name), config)


def ignores(name: str, config: Glm5NextConfig) -> bool:
    """See base.Family. A layer that uses the choice of another may store an unused indexer."""
    name = rename(name)
    others = set(config.full).difference(config.indexed)
    if ".self_attn.indexer." in name and is_layer(name, others):
        return True
    return name.startswith(_VISION) or sigmoid_ignores(name, config)


def rename(name: str) -> str:
    """Return a tensor's name as in a model of text alone, and as transformers' modules have it."""
    name = name.replace("model.language_model.", "model.", 1)
    return name.replace(".hc_attn_", ".attn_hc.").replace(".hc_ffn_", ".ffn_hc.")


FAMILY = Family("glm5_next", parse, build, expert, ignores, rename=rename)
