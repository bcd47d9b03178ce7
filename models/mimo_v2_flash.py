"""MiMo-V2-Flash: windows with sinks, values narrower than keys, key heads that differ per layer.

Math as in transformers 5.23, modeling_mimo_v2_flash.py. The first of the modules of multi-token
prediction (model.mtp) is kept. Its network is dense: it is stored as the module's only expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from moeinf.models.base import ExpertPart, Family, Model, MoeShape, Parts, Role
from moeinf.models.config import MAX_CONTEXT, MAX_HEADS, MAX_WIDTH, Fields, require
from moeinf.models.layers.attention import GqaCore, GqaShape, gqa_projections, parse_gqa
from moeinf.models.layers.decoder import Block, BodyConfig, Decoder, parse_body
from moeinf.models.layers.feed_forward import FeedForward, FfnPlan
from moeinf.models.layers.kv_cache import PassRows
from moeinf.models.layers.moe import SparseFfn
from moeinf.models.layers.mtp import MtpModules, in_mimo, mtp_family
from moeinf.models.layers.norms import RmsNorm
from moeinf.models.layers.rope import RopeConfig, parse_rope, without_rope
from moeinf.models.layers.routing import only_expert
from moeinf.models.layers.sigmoid_experts import (
    SigmoidExperts,
    parse_mlp_types,
    parse_sigmoid_experts,
    sigmoid_expert,
    sigmoid_ffn,
    sigmoid_ignores,
)

_FULL, _SLIDING = "full_attention", "sliding_attention"
_KINDS = (_FULL, _SLIDING)  # the values of hybrid_layer_pattern, and the order of the ropes
_PARTIAL = 0.334
_EVERY = 6  # without a list, the first layer and every sixth see the whole text
_ASIDE = "model.mtp."
_NETWORK: dict[str, Role] = {
    "model.layers.0.mlp.gate_proj.weight": "gate",
    "model.layers.0.mlp.up_proj.weight": "up",
    "model.layers.0.mlp.down_proj.weight": "down",
}


@dataclass(frozen=True)
class MimoV2FlashConfig:
    """The checked values of config.json."""

    body: BodyConfig  # its rope is that of the layers with full attention
    sliding_rope: RopeConfig
    attention: tuple[GqaShape, ...]  # one per layer; a window marks the sliding ones
    sinks: tuple[bool, bool]  # of the layers with full attention, of the sliding ones
    value_scale: float  # attention_value_scale
    ffn: SigmoidExperts

    @property
    def moe(self) -> MoeShape:
        return self.ffn.plan.moe


def parse(values: Mapping[str, Any]) -> MimoV2FlashConfig:
    """See base.Family.

    Published files have lists of 0 and 1 for the kinds of layers, and swa_ keys for the sliding
    ones. The lists and sections of words that transformers writes win over them.
    """
    plain = Fields(without_rope(values))
    fields = Fields(values)
    eps = fields.number("layernorm_epsilon", low=0.0, high=1.0, default=1e-5)
    body = parse_body(plain, default_theta=1e4, default_eps=eps)
    fields.refuse("n_shared_experts", 0)
    sparse = parse_mlp_types(fields, body.layers)
    if not fields.has("mlp_layer_types") and fields.has("moe_layer_freq"):
        sparse = tuple(i for i, one in enumerate(_bits(fields, "moe_layer_freq", body)) if one)
    ffn = parse_sigmoid_experts(fields, body, sparse, default_scale=1.0)
    scaled = values.get("attention_value_scale", 0.707) is not None
    return MimoV2FlashConfig(
        body=replace(body, rope=_rope(values, _FULL, "rope_theta", 5e6)),
        sliding_rope=_rope(values, _SLIDING, "swa_rope_theta", 1e4),
        attention=_attention(fields, body),
        sinks=(
            fields.flag("add_full_attention_sink_bias"),
            fields.flag("add_swa_attention_sink_bias", default=True),
        ),
        value_scale=fields.number(
            "attention_value_scale", low=1e-3, high=1e3, default=0.707 if scaled else 1.0
        ),
        ffn=replace(ffn, shared_experts=0, extra_layers=range(0)),
    )


def _bits(fields: Fields, name: str, body: BodyConfig) -> tuple[int, ...]:
    """Return a list of 0 and 1 with one value per layer."""
    found = fields.integers(name, high=body.layers)
    require(len(found) == body.layers, f"{name} needs one value per layer")
    require(set(found) <= {0, 1}, f"{name} has other values than 0 and 1")
    return found


def _attention(fields: Fields, body: BodyConfig) -> tuple[GqaShape, ...]:
    """Return the shape of every layer. Sliding layers have their own number of key heads."""
    shape = replace(
        parse_gqa(fields, body.hidden, body.heads, default_head_dim=192),
        qkv_bias=fields.flag("attention_bias"),
        value_dim=fields.integer("v_head_dim", high=MAX_WIDTH, default=128),
    )
    fields.refuse("swa_num_attention_heads", shape.heads)
    fields.refuse("swa_head_dim", shape.head_dim)
    fields.refuse("swa_v_head_dim", shape.value_width)
    fields.refuse_null("sliding_window")
    window = fields.integer("sliding_window", high=MAX_CONTEXT, default=129)
    before = fields.optional_integer("sliding_window_size", high=MAX_CONTEXT)
    sliding = replace(
        shape,
        kv_heads=fields.integer(
            "swa_num_key_value_heads", high=MAX_HEADS, default=2 * shape.kv_heads
        ),
        window=window if before is None else before + 1,  # a token sees so many before it
    )
    kinds = fields.words("layer_types", known=_KINDS, count=body.layers)
    if kinds is None and fields.has("hybrid_layer_pattern"):
        kinds = tuple(_KINDS[bit] for bit in _bits(fields, "hybrid_layer_pattern", body))
    if kinds is None:
        full = {0, *range(_EVERY - 1, body.layers, _EVERY)}
        kinds = tuple(_KINDS[layer not in full] for layer in range(body.layers))
    return tuple(shape if kind == _FULL else sliding for kind in kinds)


def _rope(values: Mapping[str, Any], kind: str, theta_key: str, default_theta: float) -> RopeConfig:
    """Return the rope of a kind of layer: its section of rope_parameters, or keys of its own."""
    fields = Fields(values)
    fields.refuse("rope_scaling", {})
    ropes = fields.section("rope_parameters")
    if ropes is None:
        theta = fields.number(theta_key, low=2.0, high=1e12, default=default_theta)
        partial = fields.number("partial_rotary_factor", low=0.0, high=1.0, default=_PARTIAL)
        return RopeConfig(theta, partial=partial)
    require(ropes.section(kind) is not None, f"rope_parameters lacks {kind}")
    where = f"config.json: rope_parameters: {kind}"
    section = Fields(values["rope_parameters"][kind], where)
    section.choice("rope_type", "type", default="default", known=("default",))
    section.number("rope_theta", low=2.0, high=1e12)
    own = Fields({"rope_parameters": values["rope_parameters"][kind]}, where)
    return parse_rope(own, MAX_CONTEXT, default_theta, _PARTIAL)


class MimoAttention:
    """Grouped-query attention of one layer, with scaled values and the rope of its kind."""

    def __init__(self, config: MimoV2FlashConfig, parts: Parts, layer: int, prefix: str) -> None:
        shape = config.attention[layer]
        slides = shape.window is not None
        self._rope = int(slides and config.sliding_rope != config.body.rope)
        self._scale = config.value_scale
        self._projections = gqa_projections(parts, prefix, config.body.hidden, shape)
        sinks = None
        if config.sinks[slides]:
            sinks = parts.tensor(f"{prefix}.sinks", shape.heads)
        self._core = parts.tuned(GqaCore(layer, shape, sinks=sinks))

    def __call__(self, x: Tensor, rows: PassRows) -> Tensor:
        """Map x [T, D] to [T, D]; write each request's keys and values into its cache."""
        p = self._projections
        return p.o(self._core(p.q(x), p.k(x), p.v(x) * self._scale, rows.turned_by(self._rope)))


def build(config: MimoV2FlashConfig, parts: Parts) -> Model:
    """See base.Family."""
    body, shape = config.body, config.attention[0]
    blocks = [
        _block(config, parts, n, sigmoid_ffn(config.ffn, parts, n, f"model.layers.{n}.mlp"))
        for n in range(body.layers)
    ]
    return Decoder(
        body,
        config.moe,
        shape.planes,
        body.rope.turning(shape.head_dim),
        blocks,
        parts,
        more_ropes=[(config.sliding_rope, config.sliding_rope.turning(shape.head_dim))],
        planes_of_each=[one.planes for one in config.attention],
    )


def mtp(config: MimoV2FlashConfig) -> Family | None:
    """Return the family of the first module of multi-token prediction: see base.Family.

    It is a sliding layer with a dense network (vLLM, mimo_v2_flash_mtp.py).
    """
    shapes = [shape for shape in config.attention if shape.window is not None]
    width = config.ffn.plan.dense_intermediate
    if not shapes or width is None:
        return None
    plan = FfnPlan(MoeShape(1, 1, 1, config.body.hidden, width), range(1), None)
    own = replace(
        config,
        body=replace(config.body, layers=1, rope=config.sliding_rope),
        attention=(shapes[0],),
        ffn=replace(config.ffn, plan=plan, groups=None),
    )
    return mtp_family("mimo_v2_flash", own, build_mtp, in_mimo, _module_expert)


def build_mtp(config: MimoV2FlashConfig, parts: Parts) -> MtpModules:
    """Build the module of multi-token prediction, from the config that `mtp` makes."""
    shape, rope = config.attention[0], config.sliding_rope
    block = _block(config, parts, 0, SparseFfn(0, only_expert, None))
    turning = rope.turning(shape.head_dim)
    return MtpModules(config.body, config.moe, shape.planes, turning, [block], parts)


def _module_expert(name: str, _: MimoV2FlashConfig) -> ExpertPart | None:
    role = _NETWORK.get(name)
    return None if role is None else ExpertPart(0, 0, role)


def _block(config: MimoV2FlashConfig, parts: Parts, layer: int, ffn: FeedForward) -> Block:
    body, prefix = config.body, f"model.layers.{layer}"

    def norm(name: str) -> RmsNorm:
        return RmsNorm(parts.tensor(f"{prefix}.{name}.weight", body.hidden), body.norm_eps)

    return Block(
        attention_norm=norm("input_layernorm"),
        attention=MimoAttention(config, parts, layer, f"{prefix}.self_attn"),
        ffn_norm=norm("post_attention_layernorm"),
        ffn=ffn,
    )


def expert(name: str, config: MimoV2FlashConfig) -> ExpertPart | None:
    """See base.Family."""
    return None if name.startswith(_ASIDE) else sigmoid_expert(name, config)


def ignores(name: str, config: MimoV2FlashConfig) -> bool:
    """See base.Family."""
    return name.startswith(_ASIDE) or sigmoid_ignores(name, config)


def rename(name: str) -> str:
    """Return the name of a layer's sinks as in transformers."""
    return name.replace(".self_attn.attention_sink_bias", ".self_attn.sinks")


FAMILY = Family("mimo_v2_flash", parse, build, expert, ignores, rename=rename, mtp=mtp)
