"""GLM-4.7-Flash: DeepSeek-V3's layers, with the dense ones named in a list.

Math as in transformers 5.23, modeling_glm4_moe_lite.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeinf.models.base import Family
from moeinf.models.config import Fields
from moeinf.models.deepseek_v3 import DeepseekV3Config, build
from moeinf.models.layers.decoder import parse_body
from moeinf.models.layers.mla import parse_mla
from moeinf.models.layers.sigmoid_experts import (
    parse_mlp_types,
    parse_sigmoid_experts,
    sigmoid_expert,
    sigmoid_ignores,
)


def parse(values: Mapping[str, Any]) -> DeepseekV3Config:
    """See base.Family. Without mlp_layer_types the first layers are dense, by default one."""
    fields = Fields(values)
    body = parse_body(fields, default_theta=1e4, default_eps=1e-5)
    fields.refuse_null("rope_interleave")
    fields.refuse("rope_interleave", True)
    fields.expect("num_key_value_heads")
    fields.refuse("num_key_value_heads", body.heads)
    return DeepseekV3Config(
        body=body,
        attention=parse_mla(fields, body.heads, body.rope),
        ffn=parse_sigmoid_experts(
            fields, body, parse_mlp_types(fields, body.layers), default_scale=1.8
        ),
    )


FAMILY = Family("glm4_moe_lite", parse, build, sigmoid_expert, sigmoid_ignores)
