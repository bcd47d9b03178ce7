"""Qwen3.8-Flash-Next: DeltaNet and sparse attention between four streams, and a table of n-grams.

Math as in transformers 5.23, modeling_qwen4_exp.py, for text alone. The vision part (model.visual)
is left out. For text the three position axes of its rope are equal, so it is an ordinary rope.
The hash functions of n-grams follow from the config, so their buffers are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moeinf.models.base import Family, Linear, Model, Parts
from moeinf.models.config import MAX_HEADS, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, Fields, require
from moeinf.models.layers.attention import parse_gqa
from moeinf.models.layers.block_indexer import (
    BlockIndexer,
    BlockIndexShape,
    SparseGqaAttention,
    parse_block_indexer,
)
from moeinf.models.layers.decoder import Decoder, parse_body
from moeinf.models.layers.delta_net import MAX_KERNEL, DeltaNet, parse_delta
from moeinf.models.layers.feed_forward import parse_ffn
from moeinf.models.layers.ffn import gated_shared
from moeinf.models.layers.hyper_connection import (
    StreamBlock,
    StreamInjection,
    StreamMix,
    StreamShape,
)
from moeinf.models.layers.moe import SparseFfn
from moeinf.models.layers.ngram_layer import NgramLayer, NgramLayerShape
from moeinf.models.layers.ngrams import NgramShape
from moeinf.models.layers.routing import SoftmaxRouter
from moeinf.models.qwen3_5_moe import (
    InnerParts,
    Qwen35MoeConfig,
    expert,
    fused,
    parse_full_layers,
    text_fields,
)
from moeinf.models.qwen3_5_moe import ignores as qwen35_ignores

_SPARSE = ("full_attention", "indexed_attention", "qwen_sparse_attention")  # all mean the same
_BUFFERS = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
_MAX_STREAMS, _MAX_NGRAM, _MAX_ROWS = 64, 16, 1 << 30
_MAX_HASHES = 1024  # of all layers: each needs a prime number
_GATES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True, kw_only=True)
class Qwen4ExpConfig(Qwen35MoeConfig):
    """The checked values of config.json."""

    index: BlockIndexShape
    streams: StreamShape
    output_gate: str  # of the DeltaNet layers
    ngram_layers: tuple[int, ...]  # ascending
    ngrams: NgramLayerShape | None  # None without such layers


def parse(values: Mapping[str, Any]) -> Qwen4ExpConfig:
    """See base.Family. The keys of a model with vision are in its text_config."""
    fields, inner = text_fields(values)
    fields.refuse("attn_output_gate", True)
    fields.refuse("mlp_only_layers", [])
    body = parse_body(fields, default_theta=1e4, default_eps=1e-6, default_partial=1.0)
    shape = parse_gqa(fields, body.hidden, body.heads, default_head_dim=256)
    shape = replace(shape, bias=fields.flag("attention_bias"), gated=True)
    full = parse_full_layers(fields, body.layers, _SPARSE)
    count = fields.integer("hc_count", low=2, high=_MAX_STREAMS, default=4)
    rank = fields.integer("hc_lowrank", high=MAX_WIDTH, default=320)
    streams = StreamShape(count, body.hidden, rank, body.norm_eps)
    ngram_layers = _ngram_layers(fields, body.layers, full)
    return Qwen4ExpConfig(
        body=body,
        attention=shape,
        delta=parse_delta(fields),
        full=full,
        ffn=parse_ffn(fields, range(body.layers), body.layers, body.hidden),
        shared_intermediate=fields.integer("shared_expert_intermediate_size", high=MAX_WIDTH),
        inner=inner,
        renormalise=fields.flag("norm_topk_prob", default=True),
        mtp=False,
        index=parse_block_indexer(fields, body.rope.turning(shape.head_dim)),
        streams=streams,
        output_gate=fields.choice("output_gate_type", default="silu", known=tuple(_GATES)),
        ngram_layers=ngram_layers,
        ngrams=_ngrams(fields, streams, body.vocab, ngram_layers) if ngram_layers else None,
    )


def _ngram_layers(fields: Fields, layers: int, full: tuple[int, ...]) -> tuple[int, ...]:
    numbers = fields.integers("ple_layer_ids", low=1, high=MAX_LAYERS)
    found = tuple(sorted({number - 1 for number in numbers}))
    require(
        all(layer < layers and layer not in full for layer in found),
        "ple_layer_ids must be layers of linear attention",
    )
    return found


def _ngrams(
    fields: Fields, streams: StreamShape, vocab: int, layers: tuple[int, ...]
) -> NgramLayerShape:
    ends = fields.one_or_more("eos_token_id", high=MAX_VOCAB)
    require(len(ends) > 0, "ple_layer_ids needs an eos_token_id")
    shape = NgramShape(
        size=fields.integer("ngram_size", low=2, high=_MAX_NGRAM, default=3),
        heads=fields.integer("heads_per_ngram", high=MAX_HEADS, default=8),
        least_rows=fields.integer("ngram_vocab_size_base", high=_MAX_ROWS, default=20_000_000),
        multiple=fields.integer("make_ngram_vocab_size_divisible_by", high=_MAX_ROWS, default=128),
        seed=fields.integer("seed", low=0, high=(1 << 62), default=1234),
        vocab=vocab,
        end=ends[0],
    )
    width = fields.integer("ple_embed_dim", high=MAX_WIDTH, default=streams.hidden)
    heads = shape.all_heads
    require(len(layers) * heads <= _MAX_HASHES, f"{heads} n-gram heads a layer are too many")
    require(width % heads == 0, f"ple_embed_dim {width} is not a multiple of {heads} heads")
    kernel = fields.integer("ple_conv_kernel_size", low=2, high=MAX_KERNEL, default=4)
    return NgramLayerShape(shape, streams, width, kernel)


def build(config: Qwen4ExpConfig, parts: Parts) -> Model:
    """See base.Family."""
    if config.inner:
        parts = InnerParts(parts)
    shape, body = config.attention, config.body
    recurrent = body.layers - len(config.full)
    layers: dict[int, NgramLayer] = {}
    memory = config.delta.memory(recurrent) if recurrent else None
    if config.ngrams is not None:
        assert memory is not None
        memory = replace(memory, more=(config.ngrams.memory,) * len(config.ngram_layers))
        for number, layer in enumerate(config.ngram_layers):
            place, name = recurrent + number, f"model.layers.{layer}.ple"
            layers[layer] = NgramLayer(place, number, config.ngrams, parts, name)
    return Decoder(
        body,
        config.moe,
        shape.planes,
        body.rope.turning(shape.head_dim),
        [_block(config, parts, layer, layers.get(layer)) for layer in range(body.layers)],
        parts,
        memory,
        indexers=(config.index.width,) * len(config.full),
        streams=config.streams.streams,
        ahead=[layer.ahead for layer in layers.values()],
        last=StreamMix(parts, "model.hyper_connection_mixer", config.streams),
    )


def _block(
    config: Qwen4ExpConfig, parts: Parts, layer: int, ngrams: NgramLayer | None
) -> StreamBlock:
    body, moe, prefix = config.body, config.moe, f"model.layers.{layer}"
    gate = parts.tensor(f"{prefix}.mlp.gate.weight", moe.experts, moe.hidden)
    shared: Linear = gated_shared(parts, f"{prefix}.mlp", body.hidden, config.shared_intermediate)
    return StreamBlock(
        StreamInjection(parts, f"{prefix}.attn_hyper_connection", config.streams),
        _attention(config, parts, layer),
        StreamInjection(parts, f"{prefix}.mlp_hyper_connection", config.streams),
        SparseFfn(layer, SoftmaxRouter(gate, moe.top_k, config.renormalise), shared),
        ngrams,
    )


def _attention(config: Qwen4ExpConfig, parts: Parts, layer: int) -> SparseGqaAttention | DeltaNet:
    """Return the layer's attention, or its DeltaNet; each kind counts its own layers."""
    body, shape, prefix = config.body, config.attention, f"model.layers.{layer}"
    before, eps = sum(full < layer for full in config.full), body.norm_eps
    if layer not in config.full:
        name, gate = f"{prefix}.linear_attn", _GATES[config.output_gate]
        return DeltaNet(layer - before, config.delta, body.hidden, eps, parts, name, gate=gate)
    name, rope = f"{prefix}.self_attn", (body.rope, body.rope.turning(shape.head_dim))
    plane, given = len(config.full) + before, (body.hidden, eps)
    indexer = BlockIndexer(plane, config.index, *given, rope, parts, f"{name}.indexer")
    return SparseGqaAttention(before, shape, config.index, indexer, *given, parts, name)


def ignores(name: str, config: Qwen4ExpConfig) -> bool:
    """See base.Family."""
    return name.endswith(_BUFFERS) or qwen35_ignores(name, config)


FAMILY = Family("qwen4_exp", parse, build, expert, ignores, fused)
