"""Laguna: gated attention whose heads and rope differ per layer, sigmoid routing.

Math as in transformers 5.23, modeling_laguna.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moeinf.models.base import ExpertPart, Family, Model, MoeShape, Parts
from moeinf.models.config import MAX_CONTEXT, MAX_HEADS, MAX_WIDTH, Fields, require
from moeinf.models.expert_names import MLP_EXPERTS
from moeinf.models.layers.attention import GqaCore, GqaShape, gqa_projections, parse_gqa
from moeinf.models.layers.decoder import Block, BodyConfig, Decoder, ignores_buffers, parse_body
from moeinf.models.layers.feed_forward import FfnPlan, feed_forward, parse_ffn
from moeinf.models.layers.ffn import GatedMlp, gated_mlp
from moeinf.models.layers.kv_cache import PassRows
from moeinf.models.layers.norms import HeadNorm, RmsNorm
from moeinf.models.layers.rope import RopeConfig, parse_rope, without_rope
from moeinf.models.layers.routing import SigmoidRouter
from moeinf.models.layers.sigmoid_experts import parse_mlp_types

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPES = {  # for a config without rope_parameters
    _FULL: {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
    _SLIDING: {"rope_theta": 1e4, "partial_rotary_factor": 1.0},
}
_BIAS = ".mlp.experts.e_score_correction_bias"


@dataclass(frozen=True)
class LagunaConfig:
    """The checked values of config.json."""

    body: BodyConfig  # its rope is that of the layers with full attention
    sliding_rope: RopeConfig
    attention: tuple[GqaShape, ...]  # one per layer; a window marks the sliding ones
    gate_per_head: bool  # else a gate for each dimension of a head
    ffn: FfnPlan
    shared_intermediate: int
    scale: float  # moe_routed_scaling_factor
    softcap: float  # moe_router_logit_softcapping; 0: none

    @property
    def moe(self) -> MoeShape:
        return self.ffn.moe


def parse(values: Mapping[str, Any]) -> LagunaConfig:
    """See base.Family. rope_parameters has a section for each kind of layer."""
    plain = Fields(without_rope(values))
    fields = Fields(values)
    fields.refuse("moe_apply_router_weight_on_input", False)
    gating = values.get("gating", True)
    require(gating in (True, "per-head", "per-element"), "gating must be per-head or per-element")
    body = parse_body(plain, default_theta=1e4, default_eps=1e-6)
    full, sliding = (_rope(values, kind, body.max_context) for kind in (_FULL, _SLIDING))
    shape = replace(
        parse_gqa(fields, body.hidden, body.heads, default_head_dim=128),
        bias=fields.flag("attention_bias"),
    )
    fields.refuse_null("sliding_window", "moe_router_logit_softcapping")
    window = fields.integer("sliding_window", high=MAX_CONTEXT, default=512)
    kinds = fields.words("layer_types", known=(_FULL, _SLIDING), count=body.layers)
    heads = fields.integers("num_attention_heads_per_layer", low=1, high=MAX_HEADS)
    heads = heads or (body.heads,) * body.layers
    require(len(heads) == body.layers, "num_attention_heads_per_layer needs one value per layer")
    fields.refuse("first_k_dense_replace", 1)
    return LagunaConfig(
        body=replace(body, rope=full),
        sliding_rope=sliding,
        attention=tuple(
            replace(shape, heads=count, window=window if kind == _SLIDING else None)
            for count, kind in zip(heads, kinds or (_FULL,) * body.layers, strict=True)
        ),
        gate_per_head=gating != "per-element",
        ffn=parse_ffn(fields, parse_mlp_types(fields, body.layers), body.layers, body.hidden),
        shared_intermediate=fields.integer("shared_expert_intermediate_size", high=MAX_WIDTH),
        scale=fields.number("moe_routed_scaling_factor", low=1e-3, high=1e3, default=1.0),
        softcap=fields.number("moe_router_logit_softcapping", low=0.0, high=1e6, default=0.0),
    )


def _rope(values: Mapping[str, Any], kind: str, max_context: int) -> RopeConfig:
    """Return the rope of a kind of layer; one that the config lacks is the published default."""
    ropes = Fields(values).section("rope_parameters") or Fields(_ROPES)
    where = "config.json: rope_parameters"
    known = values.get("rope_parameters") or _ROPES
    if ropes.section(kind) is None:
        require(not _uses(values, kind), f"rope_parameters lacks {kind}")
        known = _ROPES
    Fields(known[kind], f"{where}: {kind}").number("rope_theta", low=2.0, high=1e12)
    own = Fields({"rope_parameters": known[kind]}, where)
    return parse_rope(own, max_context, default_theta=1e4, default_partial=1.0)


def _uses(values: Mapping[str, Any], kind: str) -> bool:
    """Return whether a layer is of this kind."""
    kinds = values.get("layer_types")
    return kind == _FULL if not isinstance(kinds, list | tuple) else kind in kinds


@dataclass(frozen=True)
class CappedRouter(SigmoidRouter):
    """A SigmoidRouter of logits that a tanh keeps within ±softcap."""

    softcap: float = 1.0

    def scores(self, logits: Tensor) -> Tensor:
        """Map logits to scores [T, E]."""
        return (torch.tanh(logits / self.softcap) * self.softcap).sigmoid()


class LagunaAttention:
    """Grouped-query attention of one layer, times the softplus of a gate."""

    def __init__(self, config: LagunaConfig, parts: Parts, layer: int, prefix: str) -> None:
        shape, hidden = config.attention[layer], config.body.hidden
        eps = config.body.norm_eps

        def head_norm(name: str) -> HeadNorm:
            return HeadNorm(RmsNorm(parts.tensor(f"{prefix}.{name}.weight", shape.head_dim), eps))

        self._projections = gqa_projections(parts, prefix, hidden, shape)
        core = GqaCore(layer, shape, head_norm("q_norm"), head_norm("k_norm"))
        self._core = parts.tuned(core)
        self._heads, self._per_head = shape.heads, config.gate_per_head
        gates = shape.heads * (1 if self._per_head else shape.head_dim)
        self._gate = parts.linear(f"{prefix}.g_proj", gates, hidden)
        self._rope = 0 if shape.window is None else 1

    def __call__(self, x: Tensor, rows: PassRows) -> Tensor:
        """Map x [T, D] to [T, D]; write each request's keys and values into its cache."""
        p, rows = self._projections, rows.turned_by(self._rope)
        out = self._core(p.q(x), p.k(x), p.v(x), rows)
        gate = functional.softplus(self._gate(x).float()).to(out.dtype)
        if self._per_head:
            return p.o((torch.unflatten(out, -1, (self._heads, -1)) * gate[..., None]).flatten(1))
        return p.o(out * gate)


def build(config: LagunaConfig, parts: Parts) -> Model:
    """See base.Family."""
    body, shape = config.body, config.attention[0]
    blocks = [_block(config, parts, layer) for layer in range(body.layers)]
    sliding = config.sliding_rope, config.sliding_rope.turning(shape.head_dim)
    return Decoder(
        body,
        config.moe,
        shape.planes,
        body.rope.turning(shape.head_dim),
        blocks,
        parts,
        more_ropes=[sliding],
    )


def _block(config: LagunaConfig, parts: Parts, layer: int) -> Block:
    body, moe, prefix = config.body, config.moe, f"model.layers.{layer}"
    mlp = f"{prefix}.mlp"

    def norm(name: str) -> RmsNorm:
        return RmsNorm(parts.tensor(f"{prefix}.{name}.weight", body.hidden), body.norm_eps)

    def router() -> SigmoidRouter:
        gate = parts.tensor(f"{mlp}.gate.weight", moe.experts, moe.hidden)
        bias = parts.tensor(f"{mlp}.gate.e_score_correction_bias", moe.experts)
        rest = moe.top_k, True, config.scale
        if not config.softcap:
            return SigmoidRouter(gate, bias, *rest)
        return CappedRouter(gate, bias, *rest, softcap=config.softcap)

    def shared() -> GatedMlp:
        return gated_mlp(parts, f"{mlp}.shared_expert", body.hidden, config.shared_intermediate)

    return Block(
        attention_norm=norm("input_layernorm"),
        attention=LagunaAttention(config, parts, layer, f"{prefix}.self_attn"),
        ffn_norm=norm("post_attention_layernorm"),
        ffn=feed_forward(config.ffn, parts, layer, mlp, router, shared),
    )


def expert(name: str, config: LagunaConfig) -> ExpertPart | None:
    """See base.Family. A router's bias is stored beside the experts."""
    if name.endswith(_BIAS):
        return None
    return MLP_EXPERTS.part(name, config.ffn.sparse_layers, config.moe.experts)


def rename(name: str) -> str:
    """Return the name of a router's bias and of shared experts as in newer checkpoints."""
    name = name.replace(_BIAS, ".mlp.gate.e_score_correction_bias")
    return name.replace(".mlp.shared_experts.", ".mlp.shared_expert.")


FAMILY = Family("laguna", parse, build, expert, ignores_buffers, rename=rename)
