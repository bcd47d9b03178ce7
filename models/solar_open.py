"""Solar-Open: GLM-4.5's layers with whole heads rotated and experts in every layer.

Math as in transformers 5.23, modeling_solar_open.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moeinf.models.base import Family
from moeinf.models.config import Fields
from moeinf.models.layers.attention import parse_gqa
from moeinf.models.layers.decoder import parse_body
from moeinf.models.layers.sigmoid_decoder import SigmoidGqaConfig, build
from moeinf.models.layers.sigmoid_experts import (
    parse_sigmoid_experts,
    sigmoid_expert,
    sigmoid_ignores,
)


def parse(values: Mapping[str, Any]) -> SigmoidGqaConfig:
    """See base.Family."""
    fields = Fields(values)
    fields.refuse("use_qk_norm", False)
    fields.refuse("first_k_dense_replace", 0)
    body = parse_body(fields, default_theta=1e6, default_eps=1e-5)
    shape = parse_gqa(fields, body.hidden, body.heads, default_head_dim=128)
    return SigmoidGqaConfig(
        body=body,
        attention=(replace(shape, qkv_bias=fields.flag("attention_bias")),) * body.layers,
        turning=shape.head_dim,
        head_norms=False,
        ffn=parse_sigmoid_experts(fields, body, range(body.layers), default_scale=1.0),
    )


FAMILY = Family("solar_open", parse, build, sigmoid_expert, sigmoid_ignores)
