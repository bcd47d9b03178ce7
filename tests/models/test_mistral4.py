"""Mistral Small 4 as published: inside a model with vision, whose names are one level deeper."""

from __future__ import annotations

from typing import Any

import pytest

from moeinf.models.base import ExpertPart, FusedPart, ModelDataError
from moeinf.models.families import family_of
from tests.tiny import TINY, tiny_config

TEXT: dict[str, Any] = tiny_config(TINY["mistral4-groups"]).to_dict()
OUTER = {"model_type": "mistral3", "text_config": TEXT, "vision_config": {"hidden_size": 8}}


def test_the_text_part_is_the_same_model() -> None:
    outer = {**OUTER, "tie_word_embeddings": True}
    assert family_of(outer).parse(outer) == family_of(TEXT).parse(TEXT)
    with pytest.raises(ModelDataError, match="with a text_config of mistral4 only"):
        family_of(OUTER).parse({**OUTER, "text_config": {**TEXT, "model_type": "ministral3"}})


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model."])
def test_names(prefix: str) -> None:
    family, config = family_of(OUTER), family_of(OUTER).parse(OUTER)
    experts = f"{prefix}layers.1.mlp.experts"  # layer 0 is dense
    assert family.expert(f"{experts}.7.up_proj.weight", config) == ExpertPart(0, 7, "up")
    assert family.fused(f"{experts}.down_proj", config) == FusedPart(0, "down")
    assert family.expert(f"{experts}.down_proj", config) is None
    assert family.rename(f"{prefix}norm.weight") == "model.norm.weight"
    assert family.rename("language_model.lm_head.weight") == "lm_head.weight"
    with pytest.raises(ModelDataError, match="layer 0 is dense"):
        family.fused(f"{prefix}layers.0.mlp.experts.down_proj", config)
    for name in ("vision_tower.x.weight", "model.multi_modal_projector.norm.weight"):
        assert family.ignores(name, config)
        assert family.expert(name, config) is None
