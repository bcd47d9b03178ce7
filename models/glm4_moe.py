"""GLM-4.5, 4.6 and 4.7: half of each head rotates, experts chosen by sigmoid scores.

Math as in transformers 5.23, modeling_glm4_moe.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from moeinf.models.base import Family
from moeinf.models.config import MAX_LAYERS, Fields
from moeinf.models.layers.attention import parse_gqa
from moeinf.models.layers.decoder import parse_body
from moeinf.models.layers.sigmoid_decoder import SigmoidGqaConfig, build, mtp
from moeinf.models.layers.sigmoid_experts import (
    parse_sigmoid_experts,
    sigmoid_expert,
    sigmoid_ignores,
)


def parse(values: Mapping[str, Any]) -> SigmoidGqaConfig:
    """See base.Family."""
    fields = Fields(values)
    body = parse_body(fields, default_theta=1e4, default_eps=1e-5, default_partial=0.5)
    shape = parse_gqa(fields, body.hidden, body.heads)
    shape = replace(shape, qkv_bias=fields.flag("attention_bias"))
    first = fields.integer("first_k_dense_replace", low=0, high=MAX_LAYERS, default=1)
    return SigmoidGqaConfig(
        body=body,
        attention=(shape,) * body.layers,
        turning=body.rope.turning(shape.head_dim),
        head_norms=fields.flag("use_qk_norm"),
        ffn=parse_sigmoid_experts(fields, body, range(first, body.layers), default_scale=1.0),
    )


FAMILY = Family(
    "glm4_moe", parse, build, sigmoid_expert, sigmoid_ignores, mtp=partial(mtp, "glm4_moe")
)
