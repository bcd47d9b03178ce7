"""K-EXAONE: rope in layers with a window only, norms per head, sigmoid routing.

Math as in transformers 5.23, modeling_exaone_moe.py. Multi-token prediction (mtp) is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moeinf.models.base import ExpertPart, Family
from moeinf.models.config import MAX_CONTEXT, MAX_LAYERS, Fields
from moeinf.models.layers.attention import parse_gqa
from moeinf.models.layers.decoder import parse_body
from moeinf.models.layers.sigmoid_decoder import SigmoidGqaConfig, build
from moeinf.models.layers.sigmoid_experts import (
    parse_mlp_types,
    parse_sigmoid_experts,
    sigmoid_expert,
    sigmoid_ignores,
)

_SLIDING, _FULL = "sliding_attention", "full_attention"
_ASIDE = "mtp."


def parse(values: Mapping[str, Any]) -> SigmoidGqaConfig:
    """See base.Family."""
    fields = Fields(values)
    body = parse_body(fields, default_theta=1e4, default_eps=1e-5)
    shape = parse_gqa(fields, body.hidden, body.heads)
    fields.refuse_null("sliding_window", "sliding_window_pattern")
    window = fields.integer("sliding_window", high=MAX_CONTEXT, default=4096)
    kinds = fields.words("layer_types", known=(_SLIDING, _FULL), count=body.layers)
    if kinds is None:
        step = fields.integer("sliding_window_pattern", high=MAX_LAYERS, default=4)
        kinds = tuple(_SLIDING if (layer + 1) % step else _FULL for layer in range(body.layers))
    return SigmoidGqaConfig(
        body=body,
        attention=tuple(
            replace(shape, window=window if kind == _SLIDING else None) for kind in kinds
        ),
        turning=shape.head_dim,
        head_norms=True,
        ffn=parse_sigmoid_experts(
            fields, body, parse_mlp_types(fields, body.layers), default_scale=2.5
        ),
        still=frozenset(layer for layer, kind in enumerate(kinds) if kind == _FULL),
    )


def expert(name: str, config: SigmoidGqaConfig) -> ExpertPart | None:
    """See base.Family."""
    return None if name.startswith(_ASIDE) else sigmoid_expert(name, config)


def ignores(name: str, config: SigmoidGqaConfig) -> bool:
    """See base.Family."""
    return name.startswith(_ASIDE) or sigmoid_ignores(name, config)


def rename(name: str) -> str:
    """Return the name of the router's bias as in other families."""
    return name.replace(".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias")


FAMILY = Family("exaone_moe", parse, build, expert, ignores, rename=rename)
