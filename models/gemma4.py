"""Gemma 4 with experts (26B-A4B): windows and global layers of other sizes, a network beside them.

Math as in transformers 5.23, modeling_gemma4.py, for text alone. Vision and audio are left out. A
layer, whose six norms all differ:

    h   = x + norm(attention(norm(x)))
    out = (h + norm(norm(mlp(norm(h))) + norm(experts(norm(h)), routed by h))) · layer_scalar

Attention norms the heads of queries, keys and values, the latter without a weight. Its scores are
not scaled. Global layers have wider heads, of which a part rotates, and their values are the keys
before norm and rope (attention_k_eq_v).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from moeinf.models import quantisation
from moeinf.models.base import ExpertPart, Family, FusedPart, Model, MoeShape, Parts
from moeinf.models.config import MAX_CONTEXT, MAX_HEADS, MAX_WIDTH, Fields, require
from moeinf.models.expert_names import ExpertNames, known_layer
from moeinf.models.layers.attention import GqaCore, GqaShape, parse_gqa
from moeinf.models.layers.decoder import BodyConfig, Decoder, ignores_buffers, parse_body
from moeinf.models.layers.ffn import GeluMlp, gated_mlp
from moeinf.models.layers.kv_cache import PassRows
from moeinf.models.layers.moe import SparseFfn, parse_moe
from moeinf.models.layers.norms import HeadNorm, WideRmsNorm
from moeinf.models.layers.rope import RopeConfig, parse_rope, without_rope
from moeinf.models.layers.routing import NormedRouter, SoftmaxRouter
from moeinf.models.layers.sandwich_block import SandwichBlock

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPES = {  # for a config without rope_parameters
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
_INNER = "model.language_model."  # prefix of the text part of a model that also sees
_ASIDE = re.compile(r"model\.(?:vision_tower|embed_vision|audio_tower|embed_audio)\.")
_NUMBER = re.compile(r"[0-9]{1,9}")
_FUSED = re.compile(
    r"model\.layers\.(0|[1-9][0-9]{0,8})\.experts\.(gate_up|down)_proj(?:\.weight)?"
)
_ROLES: Mapping[str, Literal["gate_up", "down"]] = {"gate_up": "gate_up", "down": "down"}
_EXPERTS = ExpertNames(
    "model.layers.{layer}.experts.{expert}.{role}.weight",
    {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"},
)


@dataclass(frozen=True)
class Gemma4Config:
    """The checked values of config.json."""

    body: BodyConfig  # its rope is that of the global layers
    sliding_rope: RopeConfig
    head_dims: tuple[int, int]  # of the global layers, and of those with a window
    attention: tuple[GqaShape, ...]  # one per layer; a window marks the sliding ones
    shared_keys: bool  # attention_k_eq_v
    moe: MoeShape
    dense_intermediate: int


def parse(values: Mapping[str, Any]) -> Gemma4Config:
    """See base.Family. The keys of a model that also sees are in its text_config."""
    where = "config.json"
    if Fields(values).section("text_config") is not None:
        above = ("tie_word_embeddings", *quantisation.KEYS)
        outer = {key: values[key] for key in above if key in values}
        values, where = {**values["text_config"], **outer}, f"{where}: text_config"
    fields = Fields(values, where)
    _refuse_others(fields)
    plain = without_rope(values)
    body = parse_body(Fields(plain, where), default_theta=1e4, default_eps=1e-6)
    kinds = _kinds(fields, body.layers)
    ropes = [_rope(values, kind, kind in kinds, body.max_context) for kind in (_FULL, _SLIDING)]
    attention = _attention(values, fields, body, kinds)
    moe = parse_moe(fields, body.layers, body.hidden, "moe_intermediate_size")
    return Gemma4Config(
        body=replace(
            body,
            rope=ropes[0],
            wide_norm=True,
            tied_embeddings=fields.flag("tie_word_embeddings", default=True),
            logits_cap=fields.optional_number("final_logit_softcapping", low=1e-3, high=1e6),
        ),
        sliding_rope=ropes[1],
        head_dims=_head_dims(attention),
        attention=attention,
        shared_keys=fields.flag("attention_k_eq_v"),
        moe=replace(moe, activation="geglu"),
        dense_intermediate=fields.integer("intermediate_size", high=MAX_WIDTH),
    )


def _refuse_others(fields: Fields) -> None:
    """Refuse the other members of the family: dense ones, and those made for phones."""
    require(
        fields.flag("enable_moe_block"),
        "enable_moe_block is not true: gemma4 is supported with experts only",
    )
    fields.choice("hidden_activation", default="gelu_pytorch_tanh", known=("gelu_pytorch_tanh",))
    fields.expect("hidden_size_per_layer_input")  # its default is not 0
    fields.refuse_null("hidden_activation", "tie_word_embeddings", "enable_moe_block")
    fields.refuse("hidden_size_per_layer_input", 0)
    fields.refuse("num_kv_shared_layers", 0)
    fields.refuse("use_bidirectional_attention", "vision")  # for tokens of pictures alone


def _kinds(fields: Fields, layers: int) -> tuple[str, ...]:
    """Return the kind of each layer; the last one is global, as transformers has it."""
    every_sixth = tuple(_SLIDING if (layer + 1) % 6 else _FULL for layer in range(layers))
    kinds = fields.words("layer_types", known=(_FULL, _SLIDING), count=layers) or every_sixth
    return (*kinds[:-1], _FULL)


def _attention(
    values: Mapping[str, Any], fields: Fields, body: BodyConfig, kinds: Sequence[str]
) -> tuple[GqaShape, ...]:
    """Return the shape of each layer's attention.

    transformers writes per_layer_config, where published configs have keys for global layers.
    """
    fields.refuse_null("sliding_window", "global_head_dim", "per_layer_config")
    shape = replace(
        parse_gqa(fields, body.hidden, body.heads, default_head_dim=256),
        bias=fields.flag("attention_bias"),
        scale=1.0,
    )
    window = fields.integer("sliding_window", high=MAX_CONTEXT, default=512)
    wide = replace(shape, head_dim=fields.integer("global_head_dim", high=MAX_WIDTH, default=512))
    few = fields.optional_integer("num_global_key_value_heads", high=MAX_HEADS)
    if few is not None and fields.flag("attention_k_eq_v"):
        wide = replace(wide, kv_heads=few)
    own = _own_values(values)
    if own is None:
        shapes = [wide if kind == _FULL else shape for kind in kinds]
    else:
        shapes = [_changed(shape, own.get(layer)) for layer in range(body.layers)]
    return tuple(
        one if kind == _FULL else replace(one, window=window)
        for one, kind in zip(shapes, kinds, strict=True)
    )


def _own_values(values: Mapping[str, Any]) -> dict[int, Fields] | None:
    """Return per_layer_config by layer, whose numbers may have leading zeros; None: absent."""
    name = "per_layer_config"
    given = values.get(name)
    if given is None:
        return None
    require(isinstance(given, Mapping), f"{name} must be an object")
    require(all(_NUMBER.fullmatch(str(key)) for key in given), f"{name} needs numbers of layers")
    found = {int(key): Fields(own, f"config.json: {name}") for key, own in given.items()}
    for own in given.values():
        more = set(own) - {"head_dim", "num_key_value_heads"}
        require(
            not more,
            f"{name} has a key that is not supported: {min(map(str, more), default='')[:40]!r}",
        )
    return found


def _changed(shape: GqaShape, own: Fields | None) -> GqaShape:
    """Return the shape with a layer's own values of per_layer_config."""
    if own is None:
        return shape
    return replace(
        shape,
        head_dim=own.integer("head_dim", high=MAX_WIDTH, default=shape.head_dim),
        kv_heads=own.integer("num_key_value_heads", high=MAX_HEADS, default=shape.kv_heads),
    )


def _head_dims(attention: Sequence[GqaShape]) -> tuple[int, int]:
    """Return the head_dim of the global layers, and of the others; each kind has one rope."""
    found = []
    for whole in (True, False):
        widths = {one.head_dim for one in attention if (one.window is None) == whole}
        require(len(widths) <= 1, "layers of one kind must have one head_dim")
        found.append(max(widths, default=2))
    return found[0], found[1]


def _rope(values: Mapping[str, Any], kind: str, used: bool, max_context: int) -> RopeConfig:
    """Return the rope of a kind of layer, of which the config may have no layer."""
    where = "config.json: rope_parameters"
    known = values.get("rope_parameters")
    known = _ROPES if known is None else known
    require(isinstance(known, Mapping), f"{where} must be an object")
    if known.get(kind) is None:
        require(not used, f"{where} lacks {kind}")
        known = _ROPES
    Fields(known[kind], f"{where}: {kind}").number("rope_theta", low=2.0, high=1e12)
    own = Fields({"rope_parameters": known[kind]}, where)
    return parse_rope(own, max_context, default_theta=1e4, default_partial=1.0)


class Gemma4Attention:
    """Attention of one layer, with norms of queries, keys and values before its core."""

    def __init__(self, config: Gemma4Config, parts: Parts, layer: int, prefix: str) -> None:
        shape, hidden = config.attention[layer], config.body.hidden
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        eps, bias = config.body.norm_eps, shape.bias
        whole = shape.window is None
        self._q = parts.linear(f"{prefix}.q_proj", wide, hidden, bias)
        self._k = parts.linear(f"{prefix}.k_proj", narrow, hidden, bias)
        self._v = None
        if not (whole and config.shared_keys):
            self._v = parts.linear(f"{prefix}.v_proj", narrow, hidden, bias)
        self._o = parts.linear(f"{prefix}.o_proj", hidden, wide, bias)
        self._core = parts.tuned(GqaCore(layer, shape))
        weights = (parts.tensor(f"{prefix}.{n}_norm.weight", shape.head_dim) for n in "qk")
        q_norm, k_norm = (WideRmsNorm(weight, eps) for weight in weights)
        v_norm = WideRmsNorm(torch.ones_like(q_norm.weight), eps)
        self._norms = tuple(parts.tuned(HeadNorm(norm)) for norm in (q_norm, k_norm, v_norm))
        self._rope = 0 if whole else 1

    def __call__(self, x: Tensor, rows: PassRows) -> Tensor:
        """Map x [T, D] to [T, D]; write each request's keys and values into its cache."""
        q, k = self._q(x), self._k(x)
        v = k if self._v is None else self._v(x)
        q, k, v = (norm(y) for norm, y in zip(self._norms, (q, k, v), strict=True))
        return self._o(self._core(q, k, v, rows.turned_by(self._rope)))


def build(config: Gemma4Config, parts: Parts) -> Model:
    """See base.Family."""
    body, (wide, narrow) = config.body, config.head_dims
    # The factor is rounded as the activations are, as the models were trained.
    dtype = parts.tensor("model.norm.weight", body.hidden).dtype
    factor = float(torch.tensor(math.sqrt(body.hidden), dtype=dtype))
    return Decoder(
        replace(body, embedding_scale=factor),
        config.moe,
        config.attention[0].planes,
        body.rope.turning(wide),
        [_block(config, parts, layer) for layer in range(body.layers)],
        parts,
        more_ropes=[(config.sliding_rope, config.sliding_rope.turning(narrow))],
        planes_of_each=[shape.planes for shape in config.attention],
    )


def _block(config: Gemma4Config, parts: Parts, layer: int) -> SandwichBlock:
    body, prefix = config.body, f"model.layers.{layer}"

    def norm(name: str) -> WideRmsNorm:
        return WideRmsNorm(parts.tensor(f"{prefix}.{name}.weight", body.hidden), body.norm_eps)

    mlp = gated_mlp(parts, f"{prefix}.mlp", body.hidden, config.dense_intermediate, GeluMlp)
    mlp_norms = [
        parts.tuned(norm(name))
        for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm_1")
    ]
    return SandwichBlock(
        attention_norm=norm("input_layernorm"),
        attention=Gemma4Attention(config, parts, layer, f"{prefix}.self_attn"),
        after_attention_norm=norm("post_attention_layernorm"),
        ffn=SparseFfn(
            layer,
            _router(config, parts, f"{prefix}.router"),
            shared=lambda x: mlp_norms[1](mlp(mlp_norms[0](x))),
            before=parts.tuned(norm("pre_feedforward_layernorm_2")),
            after=parts.tuned(norm("post_feedforward_layernorm_2")),
        ),
        after_ffn_norm=norm("post_feedforward_layernorm"),
        scalar=parts.tensor(f"{prefix}.layer_scalar", 1),
    )


def _router(config: Gemma4Config, parts: Parts, prefix: str) -> NormedRouter:
    """Return the router; the factor hidden^-0.5 is a part of its norm's weight."""
    moe, body = config.moe, config.body
    scale = parts.tensor(f"{prefix}.scale", moe.hidden).float() * body.hidden**-0.5
    weight = parts.tensor(f"{prefix}.proj.weight", moe.experts, moe.hidden)
    factors = parts.tensor(f"{prefix}.per_expert_scale", moe.experts).float()
    return NormedRouter(
        WideRmsNorm(scale, body.norm_eps), SoftmaxRouter(weight, moe.top_k, True), factors
    )


def expert(name: str, config: Gemma4Config) -> ExpertPart | None:
    """See base.Family."""
    if _ASIDE.match(name):
        return None
    return _EXPERTS.part(rename(name), range(config.body.layers), config.moe.experts)


def ignores(name: str, config: Gemma4Config) -> bool:
    """See base.Family."""
    return _ASIDE.match(name) is not None or ignores_buffers(rename(name), config)


def fused(name: str, config: Gemma4Config) -> FusedPart | None:
    """See base.Family. Raises ModelDataError for a layer that the config does not have."""
    match = _FUSED.fullmatch(rename(name))
    if match is None:
        return None
    return FusedPart(known_layer(name, match[1], config.body.layers), _ROLES[match[2]])


def rename(name: str) -> str:
    """Return a tensor's name as in a model of text alone."""
    return name.replace(_INNER, "model.", 1) if name.startswith(_INNER) else name


FAMILY = Family("gemma4", parse, build, expert, ignores, fused, rename)
