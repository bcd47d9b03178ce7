"""Configs with the keys of published files say the same as transformers reads in them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from moeinf.models import FAMILIES, family_of
from moeinf.models.base import ExpertPart
from tests.models.test_names import config_of
from tests.tiny import tiny_config

_DATA = Path(__file__).parents[1] / "data"
MIMO: dict[str, Any] = json.loads((_DATA / "configs.json").read_text("utf-8"))[
    "XiaomiMiMo/MiMo-V2-Flash"
]
KIMI: dict[str, Any] = {
    **json.loads((_DATA / "sizes.json").read_text("utf-8"))["kimi-linear-48b-a3b"],
    "model_max_length": 1048576,
}


@pytest.mark.parametrize(
    ("published", "config_class"),
    [(MIMO, "MiMoV2FlashConfig"), (KIMI, "KimiLinearConfig")],
    ids=["mimo", "kimi"],
)
def test_published_keys(published: dict[str, Any], config_class: str) -> None:
    kind = getattr(transformers, config_class)
    theirs = kind.from_dict(copy.deepcopy(published)).to_dict()
    family = family_of(published)
    assert family.parse(published) == family.parse(theirs)
    lists = ("layer_types", "mlp_layer_types", "rope_parameters")
    bare = {key: value for key, value in theirs.items() if key not in lists}
    assert family.parse(bare) == family.parse(published)


def test_mimo_has_keys_of_its_own() -> None:
    config = family_of(MIMO).parse(MIMO)
    shapes = [(one.kv_heads, one.head_dim, one.value_width) for one in config.attention]
    assert shapes[:2] == [(4, 192, 128), (8, 192, 128)]
    windows = [layer for layer, one in enumerate(config.attention) if one.window is not None]
    assert windows == [layer for layer in range(48) if MIMO["hybrid_layer_pattern"][layer]]
    assert config.attention[1].window == 129  # the token itself, and 128 before it
    own = family_of(MIMO).parse({
        **MIMO,
        "hybrid_layer_pattern": [1] + [0] * 47,
        "moe_layer_freq": [1, 0] * 24,
        "swa_num_key_value_heads": 16,
        "swa_rope_theta": 77,
        "rope_theta": 99,
        "partial_rotary_factor": 0.5,
        "layernorm_epsilon": 0.25,
        "add_full_attention_sink_bias": True,
    })  # fmt: skip
    assert [one.kv_heads for one in own.attention] == [16] + [4] * 47
    assert own.ffn.plan.sparse_layers == tuple(range(0, 48, 2))
    assert (own.sliding_rope.theta, own.body.rope.theta) == (77, 99)
    assert own.body.rope.turning(192) == 96
    assert own.body.norm_eps == 0.25
    assert own.sinks == (True, True)


def test_mimos_names() -> None:
    family, config = config_of("mimo")
    part = family.expert("model.layers.1.mlp.experts.6.up_proj.weight", config)
    assert part == ExpertPart(0, 6, "up")
    stored = "model.layers.1.self_attn.attention_sink_bias"
    assert family.rename(stored) == "model.layers.1.self_attn.sinks"
    aside = "model.mtp.layers.0.mlp.experts.0.up_proj.weight"
    assert family.ignores(aside, config)
    assert family.expert(aside, config) is None


def test_kimis_names() -> None:
    """The dense layer is called as in published files, and as transformers writes it."""
    family, config = config_of("kimi-linear")
    experts = "model.layers.{}.block_sparse_moe.experts.7.w3.weight"
    assert family.expert(experts.format(3), config) == ExpertPart(2, 7, "up")
    for word in ("mlp", "block_sparse_moe"):
        name = f"model.layers.0.{word}.gate_proj.weight"
        assert family.rename(name) == "model.layers.0.mlp.gate_proj.weight"


def test_kimis_layers_by_number() -> None:
    values = dict(tiny_config("kimi-linear").to_dict())
    inner = {
        "full_attn_layers": [2],
        "kda_layers": [1, 3, 4],
        "num_heads": 5,
        "head_dim": 14,
        "short_conv_kernel_size": 3,
    }
    config = family_of(values).parse({**values, "layer_types": None, "linear_attn_config": inner})
    assert config.full == (1,)
    assert (config.delta.value_heads, config.delta.key_dim, config.delta.kernel) == (5, 14, 3)


@pytest.mark.parametrize(
    ("outer", "inner", "bound"),
    [
        ({}, {"gate_lower_bound": -3.0}, -3.0),
        ({"linear_lower_bound": -2.0}, {"num_heads": 4}, -2.0),
        ({"linear_lower_bound": None}, {"num_heads": 4}, -5.0),  # safe_gate
        ({"linear_lower_bound": None}, {"safe_gate": False}, None),
        ({"linear_lower_bound": None}, None, None),
    ],
)
def test_glms_bound_of_decays(outer: Any, inner: Any, bound: float | None) -> None:
    """As transformers reads it; also inside the config of a model that sees."""
    text = {**tiny_config("glm5-next").to_dict(), **outer}
    if inner is not None:
        text["linear_attn_config"] = inner
    family = FAMILIES["glm5_next"]
    assert family.parse(text).forgetting.bound == bound
    whole = {"model_type": "glm5_next", "text_config": text, "tie_word_embeddings": True}
    assert family.parse(whole).forgetting.bound == bound
    assert family.parse(whole).body.tied_embeddings
    theirs = transformers.Glm5NextTextConfig(**{**text, "model_type": "glm5_next_text"})
    assert theirs.linear_lower_bound == bound


def test_glms_names() -> None:
    """With the vision part and without it; unused tensors of the last layer and of indexers."""
    family, config = config_of("glm5-next")
    for inside in ("language_model.", ""):
        prefix = f"model.{inside}layers"
        part = family.expert(f"{prefix}.2.mlp.experts.7.up_proj.weight", config)
        assert part == ExpertPart(1, 7, "up")
        assert family.rename(f"{prefix}.2.hc_ffn_base") == "model.layers.2.ffn_hc.base"
        for aside in ("self_attn.q_proj.weight", "mlp.experts.0.up_proj.weight", "eh_proj.weight"):
            assert family.ignores(f"{prefix}.4.{aside}", config)
            assert family.expert(f"{prefix}.4.{aside}", config) is None
    assert family.ignores("model.visual.blocks.0.attn.proj.weight", config)
    family, config = config_of("glm5-next-shared")
    name = "model.language_model.layers.{}.self_attn.indexer.wk.weight"
    assert [family.ignores(name.format(layer), config) for layer in range(3)] == [
        False,
        True,
        False,
    ]
