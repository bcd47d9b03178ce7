"""Qwen3.5-MoE and Qwen3.6: three layers of Gated DeltaNet to one of gated attention.

Math as in transformers 5.23, modeling_qwen3_5_moe.py, for text alone. The vision part
(model.visual) is left out. For text the three position axes of its rope are equal, so it is an
ordinary partial rope.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor

from moeinf.models import quantisation
from moeinf.models.base import (
    Embedding,
    ExpertPart,
    Family,
    FusedPart,
    Linear,
    Model,
    MoeShape,
    Parts,
    Piece,
    Table,
)
from moeinf.models.config import MAX_LAYERS, MAX_WIDTH, Fields, require
from moeinf.models.expert_names import MLP_EXPERTS, known_layer
from moeinf.models.layers.attention import GqaAttention, GqaShape, gqa_projections, parse_gqa
from moeinf.models.layers.decoder import Block, BodyConfig, Decoder, ignores_buffers, parse_body
from moeinf.models.layers.delta_net import (
    DeltaNet,
    DeltaShape,
    fused_inputs,
    parse_delta,
    split_inputs,
)
from moeinf.models.layers.feed_forward import FfnPlan, feed_forward, parse_ffn
from moeinf.models.layers.ffn import gated_shared
from moeinf.models.layers.mtp import MtpModules, in_qwen, mtp_family
from moeinf.models.layers.norms import HeadNorm, WideRmsNorm, centred_norm
from moeinf.models.layers.routing import SoftmaxRouter

_FUSED = re.compile(
    r"model\.layers\.(0|[1-9][0-9]{0,8})\.mlp\.experts\.(gate_up|down)_proj(?:\.weight)?"
)
_FUSED_ROLES: Mapping[str, Literal["gate_up", "down"]] = {"gate_up": "gate_up", "down": "down"}
_LINEAR, _FULL = "linear_attention", "full_attention"
_INNER = "model.language_model."  # prefix of the text part of a model with vision


@dataclass(frozen=True)
class Qwen35MoeConfig:
    """The checked values of config.json."""

    body: BodyConfig
    attention: GqaShape
    delta: DeltaShape
    full: tuple[int, ...]  # the layers with attention, ascending
    ffn: FfnPlan
    shared_intermediate: int
    inner: bool  # names begin with _INNER instead of "model."
    renormalise: bool = True  # norm_topk_prob
    fused_inputs: bool = False  # of DeltaNet, as in Qwen3-Next
    mtp: bool = True  # the checkpoint may have a module of multi-token prediction

    def __post_init__(self) -> None:
        require(len(self.full) > 0, "no layer has full attention")

    @property
    def moe(self) -> MoeShape:
        return self.ffn.moe

    @property
    def name_prefix(self) -> str:
        """The beginning of the names of the decoder's tensors."""
        return _INNER if self.inner else "model."

    def name(self, stored: str) -> str:
        """Return a tensor's name as in a model of text alone."""
        if stored.startswith(self.name_prefix):
            return "model." + stored.removeprefix(self.name_prefix)
        return stored


def parse(values: Mapping[str, Any]) -> Qwen35MoeConfig:
    """See base.Family. The keys of a model with vision are in its text_config."""
    fields, inner = text_fields(values)
    fields.refuse("attn_output_gate", True)
    fields.refuse("mlp_only_layers", [])
    body = parse_body(fields, default_theta=1e4, default_eps=1e-6, default_partial=0.25)
    shape = replace(
        parse_gqa(fields, body.hidden, body.heads, default_head_dim=256),
        bias=fields.flag("attention_bias"),
        gated=True,
    )
    return Qwen35MoeConfig(
        body=replace(body, centred_norm=True),
        attention=shape,
        delta=parse_delta(fields),
        full=parse_full_layers(fields, body.layers),
        ffn=parse_ffn(fields, range(body.layers), body.layers, body.hidden),
        shared_intermediate=fields.integer("shared_expert_intermediate_size", high=MAX_WIDTH),
        inner=inner,
        mtp=parse_mtp(fields),
    )


def text_fields(values: Mapping[str, Any]) -> tuple[Fields, bool]:
    """Return the keys of the text part, and whether they are in the text_config of a model."""
    outer = Fields(values)
    if outer.section("text_config") is None:
        return outer, False
    above = ("tie_word_embeddings", *quantisation.KEYS)
    both = {**values["text_config"], **{key: values[key] for key in above if key in values}}
    return Fields(both, "config.json: text_config"), True


def parse_mtp(fields: Fields) -> bool:
    """Return whether the config has one module of multi-token prediction, with our embedding."""
    count = fields.integer("mtp_num_hidden_layers", low=0, high=MAX_LAYERS, default=1)
    return count == 1 and not fields.flag("mtp_use_dedicated_embeddings")


def parse_full_layers(
    fields: Fields, layers: int, words: tuple[str, ...] = (_FULL,)
) -> tuple[int, ...]:
    """Return the layers with full attention.

    layer_types gives them one of the words. Without it they are every full_attention_interval-th
    layer.
    """
    types = fields.words("layer_types", known=(_LINEAR, *words), count=layers)
    if types is not None:
        return tuple(layer for layer, word in enumerate(types) if word != _LINEAR)
    step = fields.integer("full_attention_interval", high=MAX_LAYERS, default=4)
    return tuple(range(step - 1, layers, step))


def build(config: Qwen35MoeConfig, parts: Parts) -> Model:
    """See base.Family."""
    if config.inner:
        parts = InnerParts(parts)
    shape, body = config.attention, config.body
    blocks = [_block(config, parts, layer) for layer in range(body.layers)]
    recurrent = body.layers - len(config.full)
    return Decoder(
        body,
        config.moe,
        shape.planes,
        body.rope.turning(shape.head_dim),
        blocks,
        parts,
        config.delta.memory(recurrent) if recurrent else None,
    )


def _block(config: Qwen35MoeConfig, parts: Parts, layer: int) -> Block:
    body, moe, prefix = config.body, config.moe, f"model.layers.{layer}"
    mlp = f"{prefix}.mlp"

    def router() -> SoftmaxRouter:
        gate = parts.tensor(f"{mlp}.gate.weight", moe.experts, moe.hidden)
        return SoftmaxRouter(gate, moe.top_k, config.renormalise)

    def shared() -> Linear:
        return gated_shared(parts, mlp, body.hidden, config.shared_intermediate)

    def norm(name: str) -> WideRmsNorm:
        return centred_norm(parts, f"{prefix}.{name}", body.hidden, body.norm_eps)

    return Block(
        attention_norm=norm("input_layernorm"),
        attention=_attention(config, parts, layer),
        ffn_norm=norm("post_attention_layernorm"),
        ffn=feed_forward(config.ffn, parts, layer, mlp, router, shared),
    )


def _attention(config: Qwen35MoeConfig, parts: Parts, layer: int) -> GqaAttention | DeltaNet:
    """Return the layer's attention, or its DeltaNet; each kind counts its own layers."""
    body, shape, prefix = config.body, config.attention, f"model.layers.{layer}"
    before = sum(full < layer for full in config.full)
    if layer not in config.full:
        rank, name = layer - before, f"{prefix}.linear_attn"
        inputs = fused_inputs if config.fused_inputs else split_inputs
        return DeltaNet(rank, config.delta, body.hidden, body.norm_eps, parts, name, inputs)
    name = f"{prefix}.self_attn"

    def head_norm(which: str) -> HeadNorm:
        return HeadNorm(centred_norm(parts, f"{name}.{which}", shape.head_dim, body.norm_eps))

    projections = gqa_projections(parts, name, body.hidden, shape)
    return GqaAttention(before, shape, projections, head_norm("q_norm"), head_norm("k_norm"))


class InnerParts:
    """`Parts` of a model whose text part is one level deeper."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.tuned: Callable[[Piece], Piece] = parts.tuned
        self.kv = parts.kv

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self._parts.tensor(_stored(name), *shape)

    def linear(
        self, prefix: str, out_features: int, in_features: int, bias: bool = False
    ) -> Linear:
        return self._parts.linear(_stored(prefix), out_features, in_features, bias)

    def embedding(self, prefix: str, count: int, width: int) -> Embedding:
        return self._parts.embedding(_stored(prefix), count, width)

    def table(self, prefix: str, count: int, width: int) -> Table:
        return self._parts.table(_stored(prefix), count, width)


def _stored(name: str) -> str:
    return _INNER + name.removeprefix("model.") if name.startswith("model.") else name


def expert(name: str, config: Qwen35MoeConfig) -> ExpertPart | None:
    """See base.Family."""
    if _is_aside(name):
        return None
    return MLP_EXPERTS.part(config.name(name), config.ffn.sparse_layers, config.moe.experts)


def ignores(name: str, config: Qwen35MoeConfig) -> bool:
    """See base.Family."""
    return _is_aside(name) or ignores_buffers(name, config)


def _is_aside(name: str) -> bool:
    return name.startswith(("model.visual.", "mtp."))


def fused(name: str, config: Qwen35MoeConfig) -> FusedPart | None:
    """See base.Family. Raises ModelDataError for a layer that the config does not have."""
    match = _FUSED.fullmatch(config.name(name))
    if match is None:
        return None
    layer = known_layer(name, match[1], config.body.layers)
    return FusedPart(layer, _FUSED_ROLES[match[2]])


def mtp(model_type: str, config: Qwen35MoeConfig) -> Family | None:
    """See base.Family. The one module is a layer of full attention with experts."""
    if not config.mtp:
        return None
    plan = FfnPlan(replace(config.moe, layers=1), range(1), None)
    body = replace(config.body, layers=1)
    own = replace(config, body=body, full=(0,), ffn=plan, inner=False)
    return mtp_family(model_type, own, build_mtp, in_qwen, expert, fused)


def build_mtp(config: Qwen35MoeConfig, parts: Parts) -> MtpModules:
    """Build the module of multi-token prediction, from the config that `mtp` makes."""
    blocks = [_block(config, parts, 0)]
    shape, body = config.attention, config.body
    turning = body.rope.turning(shape.head_dim)
    return MtpModules(body, config.moe, shape.planes, turning, blocks, parts)


FAMILY = Family(
    "qwen3_5_moe", parse, build, expert, ignores, fused, mtp=partial(mtp, "qwen3_5_moe")
)
