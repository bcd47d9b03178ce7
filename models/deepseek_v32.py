"""DeepSeek-V3.2: DeepSeek-V3 in which an indexer chooses the keys of long texts.

Math as in transformers 5.23, modeling_deepseek_v32.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moeinf.models.base import Family, Model, Parts
from moeinf.models.config import Fields, require
from moeinf.models.deepseek_v3 import DeepseekV3Config, block
from moeinf.models.layers.decoder import BodyConfig, Decoder, parse_body
from moeinf.models.layers.indexer import Indexer, IndexerShape, parse_indexer
from moeinf.models.layers.mla import MlaAttention, parse_mla
from moeinf.models.layers.sigmoid_experts import (
    parse_mlp_types,
    parse_sigmoid_experts,
    sigmoid_expert,
    sigmoid_ignores,
)
from moeinf.models.layers.sparse_mla import SparseMlaAttention

_KINDS = ("indexed_attention", "deepseek_sparse_attention")


@dataclass(frozen=True)
class DeepseekV32Config(DeepseekV3Config):
    """The checked values of config.json."""

    indexer: IndexerShape
    indexed: tuple[
        int, ...
    ]  # the layers that have an indexer, ascending; the others use its choice


def parse(values: Mapping[str, Any]) -> DeepseekV32Config:
    """See base.Family. Every layer has an indexer."""
    fields = Fields(values)
    body = parse_body(fields, default_theta=1e4, default_eps=1e-6)
    return parse_sparse(fields, body, range(body.layers), pairs=False, heads=64, groups=(8, 4))


def parse_sparse(
    fields: Fields,
    body: BodyConfig,
    indexed: tuple[int, ...] | range,
    pairs: bool,
    heads: int,
    groups: tuple[int, int],
) -> DeepseekV32Config:
    """Read the rest of a config; raise ModelDataError for invalid values.

    pairs: see IndexerShape. heads, groups: the defaults of index_n_heads, n_group and topk_group.
    """
    fields.refuse("rope_interleave", True)
    fields.expect("num_key_value_heads")
    fields.refuse("num_key_value_heads", body.heads)
    fields.refuse("moe_layer_freq", 1)
    fields.words("layer_types", known=_KINDS, count=body.layers)
    shape = parse_mla(fields, body.heads, body.rope)
    require(shape.q_lora is not None, "q_lora_rank = null is not supported with an indexer")
    sparse = parse_mlp_types(fields, body.layers, default_dense=3)
    return DeepseekV32Config(
        body=body,
        attention=shape,
        ffn=parse_sigmoid_experts(fields, body, sparse, default_scale=2.5, default_groups=groups),
        indexer=parse_indexer(fields, shape.rope, pairs, heads),
        indexed=tuple(indexed),
    )


def build(config: DeepseekV32Config, parts: Parts) -> Model:
    """See base.Family."""
    body, shape, indexer = config.body, config.attention, config.indexer
    blocks = [
        block(config, parts, layer, _attention(config, parts, layer))
        for layer in range(body.layers)
    ]
    widths = (indexer.width,) * len(config.indexed)
    return Decoder(body, config.moe, shape.planes, shape.rope, blocks, parts, indexers=widths)


def _attention(config: DeepseekV32Config, parts: Parts, layer: int) -> SparseMlaAttention:
    body, shape, prefix = config.body, config.attention, f"model.layers.{layer}.self_attn"
    indexer = None
    if layer in config.indexed:
        assert shape.q_lora is not None
        plane = body.layers + config.indexed.index(layer)
        indexer = Indexer(
            plane, config.indexer, body.hidden, shape.q_lora, parts, f"{prefix}.indexer"
        )
    lends = layer + 1 < body.layers and layer + 1 not in config.indexed
    dense = MlaAttention(layer, shape, body.hidden, parts, prefix)
    return SparseMlaAttention(dense, config.indexer, indexer, lends)


FAMILY = Family("deepseek_v32", parse, build, sigmoid_expert, sigmoid_ignores)
