"""Qwen3-Next and Qwen3-Coder-Next: Qwen3.5's layers with fused inputs of DeltaNet.

Math as in transformers 5.23, modeling_qwen3_next.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from moeinf.models.base import Family
from moeinf.models.config import MAX_WIDTH, Fields
from moeinf.models.layers.attention import parse_gqa
from moeinf.models.layers.decoder import parse_body
from moeinf.models.layers.delta_net import parse_delta
from moeinf.models.layers.feed_forward import parse_ffn, parse_sparse_step
from moeinf.models.qwen3_5_moe import (
    Qwen35MoeConfig,
    build,
    expert,
    ignores,
    mtp,
    parse_full_layers,
    parse_mtp,
)


def parse(values: Mapping[str, Any]) -> Qwen35MoeConfig:
    """See base.Family. Layers without experts are those of Qwen3."""
    fields = Fields(values)
    fields.refuse("attn_output_gate", True)
    body = parse_body(fields, default_theta=1e4, default_eps=1e-6, default_partial=0.25)
    shape = parse_gqa(fields, body.hidden, body.heads, default_head_dim=256)
    return Qwen35MoeConfig(
        body=replace(body, centred_norm=True),
        attention=replace(shape, bias=fields.flag("attention_bias"), gated=True),
        delta=parse_delta(fields),
        full=parse_full_layers(fields, body.layers),
        ffn=parse_ffn(fields, parse_sparse_step(fields, body.layers), body.layers, body.hidden),
        shared_intermediate=fields.integer("shared_expert_intermediate_size", high=MAX_WIDTH),
        inner=False,
        renormalise=fields.flag("norm_topk_prob", default=True),
        fused_inputs=True,
        mtp=parse_mtp(fields),
    )


FAMILY = Family("qwen3_next", parse, build, expert, ignores, mtp=partial(mtp, "qwen3_next"))
