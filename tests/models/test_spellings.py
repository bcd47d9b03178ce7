"""Test configs in the spelling of transformers 5, and in the older one of most published files."""

from __future__ import annotations

from typing import Any

import pytest

from moeinf.models.families import family_of
from tests.tiny import TINY, tiny_config

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def old_spelling(values: dict[str, Any]) -> dict[str, Any]:
    """Return the old spelling: rope_theta and rope_scaling, torch_dtype, `type` for rope_type."""
    old = {key: value for key, value in values.items() if key not in ("rope_parameters", "dtype")}
    rope = dict(values.get("rope_parameters") or {})
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            old[key] = rope.pop(key)
    if "full_attention" in rope or "main" in rope:
        old["rope_parameters"] = rope  # a section for each kind of layer has one spelling
        return {**old, "torch_dtype": "float32"}
    kind = rope.pop("rope_type", "default")
    plain = kind == "default" and values["model_type"] != "gpt_oss"  # its default is another
    old["rope_scaling"] = None if plain else {**rope, "type": kind}
    return {**old, "torch_dtype": "float32"}


@pytest.mark.parametrize("name", list(TINY))
def test_both_spellings_say_the_same(name: str) -> None:
    new = tiny_config(name).to_dict()
    old = old_spelling(new)
    family = family_of(new)
    assert family.parse(old) == family.parse(new)


@pytest.mark.parametrize("name", list(TINY))
def test_experts_are_counted_under_any_name(name: str) -> None:
    values = tiny_config(name).to_dict()
    counts = {values.pop(key) for key in _EXPERTS if key in values}
    assert len(counts) == 1
    family, count = family_of(values), counts.pop()
    first, *others = [family.parse({**values, key: count}) for key in _EXPERTS]
    assert first == family.parse(tiny_config(name).to_dict())
    assert all(other == first for other in others)
