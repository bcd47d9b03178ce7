"""Switch Transformers: T5 with one ReLU expert per token in every other layer.

Math as in transformers 5.23, modeling_switch_transformers.py (T5X before it).

Each expert has a capacity. In one pass it computes the first `expert_capacity` tokens that a
sequence routes to it. The layer adds nothing for the others. A decoder with a cache brings one
token per pass and drops none, in transformers and here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moeinf.models.base import ExpertPart, Experts, Family, Model, MoeShape, Parts, Role
from moeinf.models.config import (
    MAX_CONTEXT,
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    Fields,
    require,
)
from moeinf.models.expert_names import ExpertNames
from moeinf.models.layers.ffn import DenseRelu
from moeinf.models.layers.moe import Router, SparseFfn
from moeinf.models.layers.norms import RmsNorm
from moeinf.models.layers.routing import SoftmaxRouter
from moeinf.models.quantisation import refuse_quantised
from moeinf.models.seq2seq.cross_attention import (
    Heads,
    MemoryAttention,
    SelfAttention,
    SourceAttention,
)
from moeinf.models.seq2seq.encoder_decoder import (
    EMBEDDING_COPIES,
    DecoderBlock,
    EncoderBlock,
    EncoderDecoder,
    FeedForward,
    Frame,
    Sizes,
    Stack,
    stack_expert,
)

_ROLES: Mapping[str, Role] = {"wi": "up", "wo": "down"}
_FFN: Mapping[Stack, int] = {"encoder": 1, "decoder": 2}  # its number among a block's sublayers
_EXPERTS = {
    stack: ExpertNames(
        f"{stack}.block.{{layer}}.layer.{number}.mlp.experts.expert_{{expert}}.{{role}}.weight",
        _ROLES,
    )
    for stack, number in _FFN.items()
}
_CONTEXT = 512  # of pre-training, for a config without n_positions


@dataclass(frozen=True)
class SwitchConfig:
    """The checked values of config.json."""

    vocab: int
    hidden: int
    heads: int
    head_dim: int
    dense_intermediate: int
    layers: Mapping[Stack, int]
    sparse: Mapping[Stack, tuple[int, ...]]  # the layers that have experts
    moe: MoeShape
    capacity: int  # tokens of one sequence per expert
    buckets: int
    max_distance: int
    norm_eps: float
    max_context: int
    start_token: int


def parse(values: Mapping[str, Any]) -> SwitchConfig:
    """See base.Family. ReLU and float32 routers are required; all published models have them."""
    fields = Fields(values)
    refuse_quantised(fields)
    fields.choice("dense_act_fn", "feed_forward_proj", default="relu", known=("relu",))
    fields.choice("router_dtype", default="float32", known=("float32",))
    fields.refuse("router_bias", False)
    fields.refuse("is_gated_act", False)
    fields.refuse("tie_word_embeddings", True)
    hidden = fields.integer("d_model", "hidden_size", high=MAX_WIDTH)
    intermediate = fields.integer("d_ff", high=MAX_WIDTH)
    encoder = fields.integer("num_layers", "num_hidden_layers", high=MAX_LAYERS)
    fields.expect("num_decoder_layers")
    decoder = fields.integer("num_decoder_layers", high=MAX_LAYERS, default=encoder)
    layers: dict[Stack, int] = {"encoder": encoder, "decoder": decoder}
    sparse = {stack: _sparse_layers(fields, stack, layers[stack]) for stack in layers}
    vocab = fields.integer("vocab_size", high=MAX_VOCAB)
    buckets = fields.integer("relative_attention_num_buckets", low=4, high=1 << 16, default=32)
    require(
        buckets % 4 == 0, f"relative_attention_num_buckets must be a multiple of 4, got {buckets}"
    )
    return SwitchConfig(
        vocab=vocab,
        hidden=hidden,
        heads=fields.integer("num_heads", "num_attention_heads", high=MAX_HEADS),
        head_dim=fields.integer("d_kv", high=MAX_WIDTH),
        dense_intermediate=intermediate,
        layers=layers,
        sparse=sparse,
        moe=MoeShape(
            layers=sum(map(len, sparse.values())),
            experts=fields.integer("num_experts", high=MAX_EXPERTS),
            top_k=1,
            hidden=hidden,
            intermediate=intermediate,
            activation="relu",
            encoder_layers=len(sparse["encoder"]),
        ),
        capacity=fields.integer("expert_capacity", high=MAX_CONTEXT, default=64),
        buckets=buckets,
        max_distance=fields.integer(
            "relative_attention_max_distance", low=buckets, high=MAX_CONTEXT, default=128
        ),
        norm_eps=fields.number("layer_norm_epsilon", low=0.0, high=1.0, default=1e-6),
        max_context=fields.integer("n_positions", high=MAX_CONTEXT, default=_CONTEXT),
        start_token=fields.integer("decoder_start_token_id", low=0, high=vocab - 1, default=0),
    )


def _sparse_layers(fields: Fields, stack: Stack, layers: int) -> tuple[int, ...]:
    """Return every n-th layer from the second on; the config gives their number. n = 1: all."""
    count = fields.integer(f"num_sparse_{stack}_layers", high=MAX_LAYERS, default=3)
    require(count <= layers, f"{count} sparse {stack} layers of {layers}")
    step = layers // count
    return tuple(i for i in range(layers) if step == 1 or i % step == 1)


def build(config: SwitchConfig, parts: Parts) -> Model:
    """See base.Family."""
    tables: dict[Stack, Tensor] = {
        stack: parts.tensor(
            f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            config.buckets,
            config.heads,
        )
        for stack in _FFN
    }
    frame = Frame(
        vocab=config.vocab,
        embedding=parts.embedding("shared", config.vocab, config.hidden),
        embedding_scale=1.0,
        positions=RelativePositions(tables, config.max_distance),
        encoder_norm=_norm(config, parts, "encoder.final_layer_norm"),
        decoder_norm=_norm(config, parts, "decoder.final_layer_norm"),
        head=parts.linear("shared", config.vocab, config.hidden),
        head_scale=config.hidden**-0.5,
    )
    planes = ((config.heads, config.head_dim),) * 2
    sizes = Sizes(config.moe, config.max_context, planes, config.start_token, False)
    encoder = [_encoder_block(config, parts, i) for i in range(config.layers["encoder"])]
    decoder = [_decoder_block(config, parts, i) for i in range(config.layers["decoder"])]
    return EncoderDecoder(sizes, frame, encoder, decoder)


def _norm(config: SwitchConfig, parts: Parts, prefix: str) -> RmsNorm:
    return parts.tuned(RmsNorm(parts.tensor(f"{prefix}.weight", config.hidden), config.norm_eps))


def _encoder_block(config: SwitchConfig, parts: Parts, layer: int) -> EncoderBlock:
    at = f"encoder.block.{layer}.layer"
    return EncoderBlock(
        attention_norm=_norm(config, parts, f"{at}.0.layer_norm"),
        attention=SourceAttention(_heads(config, parts, f"{at}.0.SelfAttention")),
        ffn_norm=_norm(config, parts, f"{at}.1.layer_norm"),
        ffn=_ffn(config, parts, "encoder", layer),
    )


def _decoder_block(config: SwitchConfig, parts: Parts, layer: int) -> DecoderBlock:
    at = f"decoder.block.{layer}.layer"
    return DecoderBlock(
        attention_norm=_norm(config, parts, f"{at}.0.layer_norm"),
        attention=SelfAttention(layer, _heads(config, parts, f"{at}.0.SelfAttention")),
        memory_norm=_norm(config, parts, f"{at}.1.layer_norm"),
        memory=MemoryAttention(_heads(config, parts, f"{at}.1.EncDecAttention")),
        ffn_norm=_norm(config, parts, f"{at}.2.layer_norm"),
        ffn=_ffn(config, parts, "decoder", layer),
    )


def _heads(config: SwitchConfig, parts: Parts, prefix: str) -> Heads:
    """Return unscaled heads: T5 does not scale scores, its initial weights are smaller instead."""
    wide = config.heads * config.head_dim
    q, k, v = (parts.linear(f"{prefix}.{name}", wide, config.hidden) for name in "qkv")
    o = parts.linear(f"{prefix}.o", config.hidden, wide)
    return Heads(q, k, v, o, config.heads, scale=1.0)


def _ffn(config: SwitchConfig, parts: Parts, stack: Stack, layer: int) -> FeedForward:
    at, moe = f"{stack}.block.{layer}.layer.{_FFN[stack]}.mlp", config.moe
    if layer not in config.sparse[stack]:
        up = parts.linear(f"{at}.wi", config.dense_intermediate, config.hidden)
        down = parts.linear(f"{at}.wo", config.hidden, config.dense_intermediate)
        dense = DenseRelu(up, down)
        return lambda x, experts, sequences: dense(x)
    gate = parts.tensor(f"{at}.router.classifier.weight", moe.experts, moe.hidden)
    router = parts.tuned(SoftmaxRouter(gate, top_k=1, renormalise=False))
    first = moe.encoder_layers if stack == "decoder" else 0
    return partial(_capped, first + config.sparse[stack].index(layer), router, config.capacity)


def _capped(
    layer: int,
    router: Router,
    capacity: int,
    x: Tensor,
    experts: Experts,
    sequences: Sequence[slice],
) -> Tensor:
    """Run a MoE layer [T, D] -> [T, D]; tokens beyond an expert's capacity get no expert."""

    def route(rows: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights = router(rows)
        for sequence in sequences:
            ids[sequence] = without_overflow(ids[sequence], capacity)
        return ids, weights

    return SparseFfn(layer, route)(x, experts)


def without_overflow(ids: Tensor, capacity: int) -> Tensor:
    """Return ids [T, 1] with -1 where `capacity` earlier rows have the same expert."""
    if len(ids) <= capacity:
        return ids
    same = ids == ids.T  # [T, T]
    turn = same.tril().sum(-1, keepdim=True)  # [T, 1]: its place among its expert's rows, from 1
    return ids.masked_fill(turn > capacity, -1)


class RelativePositions:
    """T5's relative position bias (arXiv 1910.10683, section 2.1): one per stack, in all layers."""

    def __init__(self, tables: Mapping[Stack, Tensor], max_distance: int) -> None:
        """Take one table [buckets, H] for each stack."""
        self._tables, self._max_distance = tables, max_distance

    def embed(self, positions: Tensor) -> None:
        """Return None: only attention uses positions."""

    def bias(self, stack: Stack, new: int, total: int) -> Tensor:
        """Return the bias [H, new, total] of the last `new` of `total` tokens."""
        table = self._tables[stack]
        at = torch.arange(total - new, total, device=table.device)[:, None]
        distance = torch.arange(total, device=table.device) - at  # [new, total]
        bucket = relative_bucket(distance, stack == "encoder", len(table), self._max_distance)
        return functional.embedding(bucket, table).permute(2, 0, 1)


def relative_bucket(distance: Tensor, both_ways: bool, buckets: int, furthest: int) -> Tensor:
    """Map distances (key - query) to buckets: one for each near distance, logarithmic beyond.

    The logarithmic ones end at `furthest`. both_ways: keys after the query have the upper half of
    the buckets. Otherwise the query does not see later keys.
    """
    base = torch.zeros_like(distance)
    if both_ways:
        buckets //= 2
        base = (distance > 0) * buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = buckets // 2
    grown = (distance.float() / exact).log() / math.log(furthest / exact) * (buckets - exact)
    far = (exact + grown.clamp(min=0).long()).clamp(max=buckets - 1)
    return base + torch.where(distance < exact, distance, far)


def expert(name: str, config: SwitchConfig) -> ExpertPart | None:
    """See base.Family."""
    return stack_expert(name, _EXPERTS, config.sparse, config.moe)


def ignores(name: str, config: SwitchConfig) -> bool:
    """See base.Family. Ignores copies of the one embedding."""
    return name in EMBEDDING_COPIES


FAMILY = Family("switch_transformers", parse, build, expert, ignores)
