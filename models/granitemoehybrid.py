"""Granite 4.0-H: Mamba2 layers and a few layers of attention, each with Granite's experts.

Math as in transformers 5.23, modeling_granitemoehybrid.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from moeinf.models import granitemoe
from moeinf.models.base import Family, Model, Parts
from moeinf.models.config import MAX_HEADS, MAX_WIDTH, Fields, require
from moeinf.models.granitemoe import GraniteMoeConfig
from moeinf.models.layers.attention import GqaAttention, GqaCore, NoRopeCore
from moeinf.models.layers.decoder import Decoder, ignores_buffers
from moeinf.models.layers.mamba2 import MAX_KERNEL, Mamba2, MambaShape, refuse_limits

_MAMBA, _FULL = ("mamba", "linear_attention"), ("attention", "full_attention")


@dataclass(frozen=True, kw_only=True)
class GraniteMoeHybridConfig(GraniteMoeConfig):
    """The checked values of config.json."""

    mamba: MambaShape
    full: tuple[int, ...]  # the layers with attention, ascending
    rotated: bool  # position_embedding_type is rope, which published models do not have

    def __post_init__(self) -> None:
        require(len(self.full) > 0, "no layer has attention")


def parse(values: Mapping[str, Any]) -> GraniteMoeHybridConfig:
    """See base.Family."""
    keys = Fields(values)
    refuse_limits(keys)
    granite = granitemoe.parse(values)
    usual = {field.name: getattr(granite, field.name) for field in fields(granite)}
    shared = keys.integer("shared_intermediate_size", high=MAX_WIDTH, default=1024)
    keys.expect("layer_types")
    kinds = keys.words("layer_types", known=_MAMBA + _FULL, count=granite.body.layers) or ()
    position = keys.choice("position_embedding_type", default="nope", known=("nope", "rope"))
    return GraniteMoeHybridConfig(
        **{**usual, "shared": shared},
        mamba=_parse_mamba(keys, granite.body.hidden),
        full=tuple(layer for layer, kind in enumerate(kinds) if kind in _FULL),
        rotated=position == "rope",
    )


def _parse_mamba(keys: Fields, hidden: int) -> MambaShape:
    heads = keys.integer("mamba_n_heads", high=MAX_HEADS, default=128)
    inner = hidden * keys.integer("mamba_expand", high=MAX_WIDTH, default=2)
    require(inner % heads == 0, f"{heads} Mamba heads do not divide a width of {inner}")
    width = inner // heads
    if not keys.is_word("mamba_d_head", "auto"):
        width = keys.integer("mamba_d_head", high=MAX_WIDTH, default=width)
    require(width * heads == inner, f"{heads} Mamba heads of {width} do not fill {inner}")
    return MambaShape(
        heads,
        width,
        groups=keys.integer("mamba_n_groups", high=MAX_HEADS, default=1),
        state=keys.integer("mamba_d_state", high=MAX_WIDTH, default=256),
        kernel=keys.integer("mamba_d_conv", low=2, high=MAX_KERNEL, default=4),
        conv_bias=keys.flag("mamba_conv_bias", default=True),
        bias=keys.flag("mamba_proj_bias"),
    )


def build(config: GraniteMoeHybridConfig, parts: Parts) -> Model:
    """See base.Family."""
    shape, body = config.attention, config.body
    blocks = [
        granitemoe.block(config, parts, layer, _mixer(config, parts, layer))
        for layer in range(body.layers)
    ]
    memory = config.mamba.memory(body.layers - len(config.full))
    return Decoder(body, config.moe, shape.planes, shape.head_dim, blocks, parts, memory)


def _mixer(config: GraniteMoeHybridConfig, parts: Parts, layer: int) -> GqaAttention | Mamba2:
    """Return the layer's attention or its Mamba2; each kind counts its own layers."""
    body, before = config.body, sum(full < layer for full in config.full)
    if layer in config.full:
        core = GqaCore if config.rotated else NoRopeCore
        return granitemoe.attention(config, parts, layer, before, core)
    name = f"model.layers.{layer}.mamba"
    return Mamba2(layer - before, config.mamba, body.hidden, body.norm_eps, parts, name)


FAMILY = Family(
    "granitemoehybrid", parse, build, granitemoe.expert, ignores_buffers, granitemoe.fused
)
