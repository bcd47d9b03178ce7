"""Every family's tiny configs have the odd values that the family can have.

test_families.py compares each config with transformers: prompts in pieces, tokens, batches,
snapshots. Here stands which families have which odd value, so that a config that loses one fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from moeinf.models.families import family_of
from tests.tiny import TINY, tiny_config

ENCODER_DECODERS = {"nllb-moe", "switch_transformers"}  # see seq2seq/
EVERY = {tiny.family for tiny in TINY.values()} - ENCODER_DECODERS
MLA = {"deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "glm5_next"}
WITH: dict[str, set[str]] = {
    "one expert": EVERY - {"phimoe"},  # its router is written for two
    "all experts": EVERY,
    "sizes": EVERY,  # the hidden and the experts' size are no multiples of 32
    "untied": EVERY,
    "tied": EVERY - {"kimi_linear", "nemotron_h"},  # refused: transformers has no tied head
    "groups": MLA  # the published Kimi-K2 and Kimi-K2.5 have one group
    | {"dots1", "exaone_moe", "glm4_moe", "glm4v_moe", "kimi_linear", "mimo_v2_flash", "mistral4"}
    | {"nemotron_h", "solar_open"},
    "dense first": MLA
    | {"dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe", "glm4v_moe", "kimi_k2", "kimi_k25"}
    | {"kimi_linear", "laguna", "lfm2_moe", "mimo_v2_flash", "mistral4", "qwen2_moe", "qwen3_moe"}
    | {"qwen3_next"},
    "dense last": MLA - {"deepseek_v2", "deepseek_v3"}  # they only count the first layers
    | {"ernie4_5_moe", "exaone_moe", "kimi_linear", "laguna", "mimo_v2_flash"}
    | {"qwen2_moe", "qwen3_next"},
    "biases": EVERY - {"deepseek_v4", "ernie4_5_moe", "exaone_moe", "minimax_m2", "mixtral"},
}
_BIASES = ("attention_bias", "conv_bias", "lm_head_bias", "mlp_bias", "qkv_bias", "use_bias")


def sparse_layers(config: Any, depth: int = 3) -> tuple[int, ...] | None:
    """Return the layers with experts, if the config or a part of it has a plan of them."""
    if hasattr(config, "sparse_layers"):
        return tuple(config.sparse_layers)
    inner = fields(config) if depth and is_dataclass(config) else ()
    found = (sparse_layers(getattr(config, one.name), depth - 1) for one in inner)
    return next((layers for layers in found if layers is not None), None)


def odd_values(name: str) -> Iterator[str]:
    values: dict[str, Any] = tiny_config(name).to_dict()
    config: Any = family_of(values).parse(values)
    moe = config.moe
    text = values.get("text_config") or values
    yield from ["one expert"] * (moe.top_k == 1)
    yield from ["all experts"] * (moe.top_k == moe.experts)
    yield from ["sizes"] * bool(moe.hidden % 32 and moe.intermediate % 32)
    yield "tied" if config.body.tied_embeddings else "untied"
    yield from ["groups"] * any((text.get(k) or 1) > 1 for k in ("n_group", "num_expert_group"))
    yield from ["biases"] * any(text.get(key) is True for key in _BIASES)
    layers = sparse_layers(config)
    if layers is not None:
        yield from ["dense first"] * (0 not in layers)
        yield from ["dense last"] * (config.body.layers - 1 not in layers)


@pytest.mark.parametrize("family", sorted(EVERY))
def test_odd_values_of(family: str) -> None:
    names = [name for name, tiny in TINY.items() if tiny.family == family]
    found = {odd for name in names for odd in odd_values(name)}
    assert found == {odd for odd, families in WITH.items() if family in families}
