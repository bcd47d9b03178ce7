"""GLM-4.5V: the config and the names of its text part, inside a model with vision."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from moeinf.models.base import ExpertPart, ModelDataError
from moeinf.models.families import FAMILIES, family_of
from tests.tiny import TINY, tiny_config

_DATA = Path(__file__).parents[1] / "data"
PUBLISHED: dict[str, Any] = json.loads((_DATA / "configs.json").read_text("utf-8"))[
    "zai-org/GLM-4.5V-FP8"
]
TEXT: dict[str, Any] = tiny_config(TINY["glm4v-dense-first"]).to_dict()
FAMILY = FAMILIES["glm4v_moe"]


def around(text: dict[str, Any], **outer: Any) -> dict[str, Any]:
    return {"model_type": "glm4v_moe", "text_config": text, "vision_config": {}, **outer}


def test_the_published_config() -> None:
    config = family_of(PUBLISHED).parse(PUBLISHED)
    theirs = transformers.Glm4vMoeConfig.from_dict(copy.deepcopy(PUBLISHED)).to_dict()
    assert FAMILY.parse(theirs) == config
    assert (config.moe.experts, config.moe.top_k, config.moe.layers) == (128, 8, 45)
    shape = config.attention[0]
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.qkv_bias) == (96, 8, 128, True)
    assert (config.turning, config.body.rope.kind, config.body.rope.theta) == (64, "default", 1e4)
    assert (config.head_norms, config.body.max_context) == (False, 65536)


def test_the_text_part_is_glm_4_5() -> None:
    """But for the biases of q, k and v, which are the default here."""
    text = {key: value for key, value in TEXT.items() if key != "attention_bias"}
    as_glm4 = FAMILIES["glm4_moe"].parse({**text, "attention_bias": True})
    assert FAMILY.parse(text) == FAMILY.parse(around(text)) == as_glm4
    assert FAMILY.parse(TEXT) == FAMILIES["glm4_moe"].parse(TEXT) != as_glm4
    with pytest.raises(ModelDataError, match="attention_bias"):
        FAMILY.parse({**TEXT, "attention_bias": None})
    with pytest.raises(ModelDataError, match="use_qk_norm"):
        FAMILY.parse(around({**TEXT, "use_qk_norm": True}))


@pytest.mark.parametrize(
    ("outer", "inner"), [(True, False), (False, True), (None, True), (True, None), (False, False)]
)
def test_embeddings_are_tied_if_either_part_says_it(outer: bool | None, inner: bool | None) -> None:
    parts: list[dict[str, Any]] = [
        {} if tied is None else {"tie_word_embeddings": tied} for tied in (outer, inner)
    ]
    text = {key: value for key, value in TEXT.items() if key != "tie_word_embeddings"}
    values = around(text | parts[1], **parts[0])
    theirs = transformers.Glm4vMoeConfig.from_dict(copy.deepcopy(values))
    assert FAMILY.parse(values).body.tied_embeddings is theirs.tie_word_embeddings
    assert theirs.tie_word_embeddings is bool(outer or inner)


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_names(prefix: str) -> None:
    config = FAMILY.parse(around(TEXT))
    experts = f"{prefix}layers.2.mlp.experts"  # layers 0 and 1 are dense
    assert FAMILY.expert(f"{experts}.7.up_proj.weight", config) == ExpertPart(0, 7, "up")
    assert FAMILY.rename(f"{prefix}norm.weight") == "model.norm.weight"
    assert FAMILY.rename("lm_head.weight") == "lm_head.weight"
    with pytest.raises(ModelDataError, match="no expert 8 in layer 2"):
        FAMILY.expert(f"{experts}.8.up_proj.weight", config)
    aside = [f"{prefix}layers.3.mlp.experts.0.up_proj.weight", f"{prefix}layers.3.eh_proj.weight"]
    for name in (*aside, "model.visual.merger.proj.weight"):  # multi-token prediction, vision
        assert FAMILY.ignores(name, config)
        assert FAMILY.expert(name, config) is None
    assert not FAMILY.ignores(f"{prefix}layers.2.input_layernorm.weight", config)
