"""dots.llm1: norms per head, experts chosen by sigmoid scores.

Math as in transformers 5.23, modeling_dots1.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moeinf.models.base import Family
from moeinf.models.config import MAX_CONTEXT, MAX_LAYERS, Fields
from moeinf.models.layers.attention import parse_gqa
from moeinf.models.layers.decoder import parse_body
from moeinf.models.layers.sigmoid_decoder import SigmoidGqaConfig, build
from moeinf.models.layers.sigmoid_experts import (
    parse_sigmoid_experts,
    sigmoid_expert,
    sigmoid_ignores,
)

_SLIDING = "sliding_attention"


def parse(values: Mapping[str, Any]) -> SigmoidGqaConfig:
    """See base.Family. A sliding_window of null means that no layer has a window."""
    fields = Fields(values)
    body = parse_body(fields, default_theta=1e4, default_eps=1e-6)
    shape = parse_gqa(fields, body.hidden, body.heads)
    shape = replace(shape, bias=fields.flag("attention_bias"))
    window = fields.optional_integer("sliding_window", high=MAX_CONTEXT)
    window = window if "sliding_window" in values else 4096
    kinds = fields.words("layer_types", known=("full_attention", _SLIDING), count=body.layers)
    if kinds is not None:
        sliding = {layer for layer, kind in enumerate(kinds) if kind == _SLIDING}
    else:
        first = fields.integer("max_window_layers", low=0, high=MAX_LAYERS, default=62)
        sliding = set(range(first, body.layers))
    dense = fields.integer("first_k_dense_replace", low=0, high=MAX_LAYERS, default=0)
    return SigmoidGqaConfig(
        body=body,
        attention=tuple(
            replace(shape, window=window if layer in sliding else None)
            for layer in range(body.layers)
        ),
        turning=shape.head_dim,
        head_norms=True,
        ffn=parse_sigmoid_experts(
            fields,
            body,
            range(dense, body.layers),
            default_scale=1.0,
            default_renormalise=False,
        ),
    )


FAMILY = Family("dots1", parse, build, sigmoid_expert, sigmoid_ignores)
