"""GLM-4.5V: the layers of GLM-4.5-Air inside a model with vision; for text alone.

Math as in transformers 5.23, modeling_glm4v_moe.py. The vision part (model.visual) is left out. For
text the three position axes of its rope are equal, so it is GLM-4.5's partial rope.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeinf.models import glm4_moe, quantisation
from moeinf.models.base import ExpertPart, Family
from moeinf.models.config import Fields
from moeinf.models.layers.sigmoid_decoder import SigmoidGqaConfig, build
from moeinf.models.layers.sigmoid_experts import sigmoid_expert, sigmoid_ignores

_INNER = "model.language_model."  # prefix of the text part's tensors
_VISION = "model.visual."


def parse(values: Mapping[str, Any]) -> SigmoidGqaConfig:
    """See base.Family. The keys are in text_config, or outside in a config of text alone."""
    text = _text(values)
    fields = Fields(text)
    fields.refuse_null("attention_bias")
    fields.refuse("use_qk_norm", False)  # transformers ignores it
    biased = fields.flag("attention_bias", default=True)
    return glm4_moe.parse({**text, "attention_bias": biased})


def _text(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of the text part. Embeddings are tied if either part says it."""
    outer = Fields(values)
    inner = outer.section("text_config")
    if inner is None:
        return values
    tied = outer.flag("tie_word_embeddings") or inner.flag("tie_word_embeddings")
    above = {key: values[key] for key in quantisation.KEYS if key in values}
    return {**values["text_config"], **above, "tie_word_embeddings": tied}


def expert(name: str, config: SigmoidGqaConfig) -> ExpertPart | None:
    """See base.Family."""
    return None if name.startswith(_VISION) else sigmoid_expert(rename(name), config)


def ignores(name: str, config: SigmoidGqaConfig) -> bool:
    """See base.Family."""
    return name.startswith(_VISION) or sigmoid_ignores(rename(name), config)


def rename(name: str) -> str:
    """Return a tensor's name as in a model of text alone."""
    return "model." + name.removeprefix(_INNER) if name.startswith(_INNER) else name


FAMILY = Family("glm4_moe", parse, build, expert, ignores, rename=rename)
