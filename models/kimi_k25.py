"""Kimi-K2.5 to K2.7: DeepSeek-V3 with other numbers, inside a model with vision; for text alone.

The vision part (vision_tower, mm_projector) is left out. Kimi-K2 is DeepSeek-V3's file as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeinf.models import deepseek_v3, quantisation
from moeinf.models.base import ExpertPart, Family, ModelDataError
from moeinf.models.config import Fields
from moeinf.models.deepseek_v3 import DeepseekV3Config
from moeinf.models.layers.sigmoid_experts import sigmoid_expert, sigmoid_ignores

_INNER = "language_model."  # prefix of the text part's tensors
_ASIDE = ("vision_tower.", "mm_projector.")


def parse(values: Mapping[str, Any]) -> DeepseekV3Config:
    """See base.Family. The keys of the text part are in text_config."""
    if Fields(values).section("text_config") is None:
        raise ModelDataError("config.json lacks text_config")
    above = ("tie_word_embeddings", *quantisation.KEYS)
    outer = {key: values[key] for key in above if key in values}
    return deepseek_v3.parse({**values["text_config"], **outer})


def expert(name: str, config: DeepseekV3Config) -> ExpertPart | None:
    """See base.Family."""
    return None if name.startswith(_ASIDE) else sigmoid_expert(rename(name), config)


def ignores(name: str, config: DeepseekV3Config) -> bool:
    """See base.Family."""
    return name.startswith(_ASIDE) or sigmoid_ignores(rename(name), config)


def rename(name: str) -> str:
    """Return a tensor's name as in a model of text alone."""
    return name.removeprefix(_INNER)


FAMILY = Family("deepseek_v3", parse, deepseek_v3.build, expert, ignores, rename=rename)
