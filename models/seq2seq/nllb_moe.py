"""NLLB-MoE: a translator; two of many ReLU experts per token in every fourth layer.

Math as in the paper (arXiv 2207.04672, section 6.2) and in fairseq. transformers 5.23 computes the
dense parts in the same way, but runs only two of the experts. At inference no expert is ever full:
its capacity is the number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeinf.models.base import ExpertPart, Family, Model, MoeShape, Parts, Role
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
from moeinf.models.layers.moe import SparseFfn
from moeinf.models.layers.norms import LayerNorm, layer_norm
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

_STACKS: tuple[Stack, ...] = ("encoder", "decoder")
_ROLES: Mapping[str, Role] = {
    "fc1.weight": "up",
    "fc1.bias": "up_bias",
    "fc2.weight": "down",
    "fc2.bias": "down_bias",
}
_EXPERTS = {
    stack: ExpertNames(f"{stack}.layers.{{layer}}.ffn.experts.expert_{{expert}}.{{role}}", _ROLES)
    for stack in _STACKS
}
_FIRST_POSITION = 2  # fairseq numbers positions after its padding token, which is 1
_PREFIX = "model."
_NORM_EPS = 1e-5


@dataclass(frozen=True)
class NllbConfig:
    """The checked values of config.json."""

    vocab: int
    hidden: int
    heads: Mapping[Stack, int]
    layers: Mapping[Stack, int]
    sparse: Mapping[Stack, tuple[int, ...]]  # the layers that have experts
    moe: MoeShape
    expert_scale: float  # factor on an expert's output: 1 - token dropout
    embedding_scale: float
    max_context: int
    start_token: int


def parse(values: Mapping[str, Any]) -> NllbConfig:
    """See base.Family. Routing must drop nothing at inference, as published."""
    fields = Fields(values)
    refuse_quantised(fields)
    fields.choice("activation_function", default="relu", known=("relu",))
    fields.choice("router_dtype", default="float32", known=("float32",))
    fields.choice("second_expert_policy", default="all", known=("all",))
    fields.refuse("router_bias", False)
    fields.refuse("normalize_router_prob_before_dropping", False, True)  # the same without dropping
    fields.refuse("moe_eval_capacity_token_fraction", 1.0, 1)
    fields.refuse("tie_word_embeddings", True)
    hidden = fields.integer("d_model", "hidden_size", low=4, high=MAX_WIDTH)  # two sines
    fields.expect("encoder_ffn_dim", "decoder_ffn_dim")
    intermediate = fields.integer("encoder_ffn_dim", "decoder_ffn_dim", high=MAX_WIDTH)
    heads = {s: fields.integer(f"{s}_attention_heads", high=MAX_HEADS) for s in _STACKS}
    for count in heads.values():
        require(hidden % count == 0, f"d_model {hidden} is not a multiple of {count} heads")
    layers = {s: fields.integer(f"{s}_layers", high=MAX_LAYERS) for s in _STACKS}
    steps = {s: fields.integer(f"{s}_sparse_step", high=MAX_LAYERS, default=4) for s in _STACKS}
    sparse = {s: tuple(range(steps[s] - 1, layers[s], steps[s])) for s in _STACKS}
    require(all(sparse.values()), "a stack has no layer with experts")
    experts = fields.integer("num_experts", high=MAX_EXPERTS)
    require(experts >= 2, "the router chooses 2 experts")
    vocab = fields.integer("vocab_size", high=MAX_VOCAB)
    dropped = fields.number("moe_token_dropout", low=0.0, high=1.0, default=0.2)
    return NllbConfig(
        vocab=vocab,
        hidden=hidden,
        heads=heads,
        layers=layers,
        sparse=sparse,
        moe=MoeShape(
            layers=sum(map(len, sparse.values())),
            experts=experts,
            top_k=2,
            hidden=hidden,
            intermediate=intermediate,
            activation="relu",
            biased=True,
            encoder_layers=len(sparse["encoder"]),
        ),
        expert_scale=1 - dropped,
        embedding_scale=math.sqrt(hidden) if fields.flag("scale_embedding", True) else 1.0,
        max_context=fields.integer("max_position_embeddings", high=MAX_CONTEXT, default=1024),
        start_token=fields.integer("decoder_start_token_id", low=0, high=vocab - 1, default=2),
    )


def build(config: NllbConfig, parts: Parts) -> Model:
    """See base.Family."""
    frame = Frame(
        vocab=config.vocab,
        embedding=parts.embedding("shared", config.vocab, config.hidden),
        embedding_scale=config.embedding_scale,
        positions=Sinusoids(config.hidden),
        encoder_norm=_norm(config, parts, "encoder.layer_norm"),
        decoder_norm=_norm(config, parts, "decoder.layer_norm"),
        head=parts.linear("shared", config.vocab, config.hidden),
        head_scale=1.0,
    )
    decoder_heads = config.heads["decoder"]
    planes = ((decoder_heads, config.hidden // decoder_heads),) * 2
    sizes = Sizes(config.moe, config.max_context, planes, config.start_token, True)
    encoder = [_encoder_block(config, parts, i) for i in range(config.layers["encoder"])]
    decoder = [_decoder_block(config, parts, i) for i in range(config.layers["decoder"])]
    return EncoderDecoder(sizes, frame, encoder, decoder)


def _norm(config: NllbConfig, parts: Parts, prefix: str) -> LayerNorm:
    return parts.tuned(layer_norm(parts, prefix, config.hidden, _NORM_EPS))


def _encoder_block(config: NllbConfig, parts: Parts, layer: int) -> EncoderBlock:
    at = f"encoder.layers.{layer}"
    return EncoderBlock(
        attention_norm=_norm(config, parts, f"{at}.self_attn_layer_norm"),
        attention=SourceAttention(_heads(config, parts, "encoder", f"{at}.self_attn")),
        ffn_norm=_norm(config, parts, f"{at}.ff_layer_norm"),
        ffn=_ffn(config, parts, "encoder", layer),
    )


def _decoder_block(config: NllbConfig, parts: Parts, layer: int) -> DecoderBlock:
    at = f"decoder.layers.{layer}"
    return DecoderBlock(
        attention_norm=_norm(config, parts, f"{at}.self_attn_layer_norm"),
        attention=SelfAttention(layer, _heads(config, parts, "decoder", f"{at}.self_attn")),
        memory_norm=_norm(config, parts, f"{at}.cross_attention_layer_norm"),
        memory=MemoryAttention(_heads(config, parts, "decoder", f"{at}.cross_attention")),
        ffn_norm=_norm(config, parts, f"{at}.ff_layer_norm"),
        ffn=_ffn(config, parts, "decoder", layer),
    )


def _heads(config: NllbConfig, parts: Parts, stack: Stack, prefix: str) -> Heads:
    wide, count = config.hidden, config.heads[stack]
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    q, k, v, o = (parts.linear(f"{prefix}.{name}", wide, wide, bias=True) for name in names)
    return Heads(q, k, v, o, count, scale=(wide // count) ** -0.5)


def _ffn(config: NllbConfig, parts: Parts, stack: Stack, layer: int) -> FeedForward:
    at, moe = f"{stack}.layers.{layer}.ffn", config.moe
    if layer not in config.sparse[stack]:
        up = parts.linear(f"{at}.fc1", moe.intermediate, moe.hidden, bias=True)
        down = parts.linear(f"{at}.fc2", moe.hidden, moe.intermediate, bias=True)
        dense = DenseRelu(up, down)
        return lambda x, experts, sequences: dense(x)
    gate = parts.tensor(f"{at}.router.classifier.weight", moe.experts, moe.hidden)
    router = SoftmaxRouter(gate, moe.top_k, renormalise=True, scale=config.expert_scale)
    first = moe.encoder_layers if stack == "decoder" else 0
    sparse = SparseFfn(first + config.sparse[stack].index(layer), parts.tuned(router))
    return lambda x, experts, sequences: sparse(x, experts)


class Sinusoids:
    """Positions as sines, then cosines, of falling frequency (arXiv 1706.03762, section 3.5)."""

    def __init__(self, width: int) -> None:
        self._width = width

    def embed(self, positions: Tensor) -> Tensor:
        """Map positions [T] to [T, D] float32; the last column of an odd width is 0."""
        half = self._width // 2
        steps = torch.arange(half, device=positions.device).float()
        speeds = torch.exp(steps * -(math.log(10000) / (half - 1)))
        angles = (positions + _FIRST_POSITION).float()[:, None] * speeds  # [T, D/2]
        both = torch.cat((angles.sin(), angles.cos()), -1)
        return torch.nn.functional.pad(both, (0, self._width % 2))

    def bias(self, stack: Stack, new: int, total: int) -> None:
        """Return None: attention does not use positions."""


def plain_name(name: str) -> str:
    """Return the name without the prefix that transformers saves and published files lack."""
    return name.removeprefix(_PREFIX)


def expert(name: str, config: NllbConfig) -> ExpertPart | None:
    """See base.Family."""
    return stack_expert(plain_name(name), _EXPERTS, config.sparse, config.moe)


def ignores(name: str, config: NllbConfig) -> bool:
    """See base.Family. Ignores copies of the one embedding, and tables of sines."""
    return plain_name(name) in EMBEDDING_COPIES or ".embed_positions." in name


FAMILY = Family("nllb-moe", parse, build, expert, ignores, rename=plain_name)
