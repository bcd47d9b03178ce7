"""GLM-5, 5.1 and 5.2: DeepSeek-V3.2's layers, of which some use the indexer of an earlier one.

Math as in transformers 5.23, modeling_glm_moe_dsa.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeinf.models.base import Family
from moeinf.models.config import MAX_LAYERS, Fields, require
from moeinf.models.deepseek_v32 import DeepseekV32Config, build, parse_sparse
from moeinf.models.expert_names import is_layer
from moeinf.models.layers.decoder import parse_body
from moeinf.models.layers.sigmoid_experts import sigmoid_expert, sigmoid_ignores


def parse(values: Mapping[str, Any]) -> DeepseekV32Config:
    """See base.Family. Only interleaved rope in the indexer, as all published checkpoints have."""
    fields = Fields(values)
    body = parse_body(fields, default_theta=1e4, default_eps=1e-5)
    indexed = parse_indexed(fields, body.layers)
    require(indexed[:1] == (0,), "indexer_types: the first layer has no indexer to use")
    return parse_sparse(fields, body, indexed, pairs=True, heads=32, groups=(1, 1))


def parse_indexed(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return the layers with an indexer: indexer_types, else every index_topk_freq-th one."""
    types = fields.words("indexer_types", known=("full", "shared"), count=layers)
    if types is not None:
        return tuple(layer for layer, word in enumerate(types) if word == "full")
    fields.refuse("index_topk_pattern")
    step = fields.integer("index_topk_freq", high=MAX_LAYERS, default=1)
    first = fields.integer("index_skip_topk_offset", low=0, high=MAX_LAYERS, default=2)
    return tuple(layer for layer in range(layers) if max(layer - first + 1, 0) % step == 0)


def ignores(name: str, config: DeepseekV32Config) -> bool:
    """See base.Family. A layer that uses the choice of another may store an unused indexer."""
    others = set(range(config.body.layers)).difference(config.indexed)
    if ".self_attn.indexer." in name and is_layer(name, others):
        return True
    return sigmoid_ignores(name, config)


FAMILY = Family("glm_moe_dsa", parse, build, sigmoid_expert, ignores)
