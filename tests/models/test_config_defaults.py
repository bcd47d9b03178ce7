"""Test missing keys of a config: each gets the default of transformers, or raises an error."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from moeinf.models.base import ModelDataError
from moeinf.models.families import FAMILIES, family_of
from tests.encoder_decoders import PAIRS
from tests.fakes import load_resident
from tests.tiny import TINY, by_default, save_tiny, tiny_config

DERIVED = (
    "layer_types",
    "mlp_layer_types",
    "indexer_types",
)  # they hide the keys from which they are computed
# Every family, and every section of rope; arctic has no class in transformers 5.
NAMES = ["mixtral-window", "mixtral-all-experts", "olmoe-yarn", "deepseek-lite", "deepseek-groups"]
NAMES += ["deepseek-v3", "deepseek-v3-bare", "glm4", "glm4-yarn", "glm4-lite", "gpt-oss", "granite"]
NAMES += ["phimoe", "phimoe-longrope", "qwen2", "qwen2-window", "qwen3-window", "qwen3.5"]
NAMES += ["qwen3.5-full-first", "granite-shared", "switch", "nllb"]
NAMES += [
    "minimax-m2",
    "qwen3-next",
    "qwen4",
    "dots1-window",
    "ernie4.5",
    "hunyuan",
    "exaone",
    "solar",
]
NAMES += ["lfm2", "mistral4", "laguna", "gemma4", "v32", "glm-dsa", "mimo", "kimi-linear"]
NAMES += ["granite-hybrid", "nemotron", "nemotron-alone", "glm5-next"]
NAMES += ["deepseek-v4", "glm4v"]
Values = dict[str, Any]


@cache
def _values(name: str) -> Values:
    if name in TINY:
        return dict(tiny_config(name).to_dict())
    pair = PAIRS[name]
    return dict(getattr(transformers, pair.config_class)(**pair.settings).to_dict())


def _without(values: Values, *keys: str) -> Values:
    return {key: value for key, value in values.items() if key not in keys}


def _lacking(values: Values) -> Iterator[tuple[str, Values]]:
    """Yield the config without each key, and with each key null, also in its rope section."""
    keys = set(values) - {"model_type"}
    for key in sorted(keys):
        yield f"no {key}", _without(values, key)
        yield f"null {key}", {**values, key: None}
    for key in sorted(keys - set(DERIVED)):
        yield f"no {key} nor lists of layers", _without(values, key, *DERIVED)
    rope = values.get("rope_parameters")
    if not rope or "rope_theta" not in rope:  # laguna has a section for each kind of layer
        return
    bare = _without(values, "rope_parameters", "original_max_position_embeddings")
    old = {"rope_theta": rope["rope_theta"], "rope_scaling": _without(rope, "rope_theta")}
    yield "the old spelling", {**bare, **old}
    for key in sorted(rope):
        less = _without(rope, key)
        yield f"no {key} in rope", {**bare, "rope_parameters": less}
        yield f"no {key} in rope, beside another", {**values, "rope_parameters": less}
        yield f"no {key} in rope_scaling", {**bare, "rope_scaling": less}
        yield f"null {key} in rope", {**bare, "rope_parameters": {**rope, key: None}}


def _theirs(values: Values) -> Values | None:
    """Return the config with the defaults of transformers; None if transformers refuses it."""
    kind = type(AutoConfig.for_model(values["model_type"]))
    try:
        full = kind.from_dict(copy.deepcopy(_without(values, "model_type"))).to_dict()
    except Exception:
        return None
    # transformers writes this key outside the section, and never reads it there.
    return _without(full, "original_max_position_embeddings")


def test_every_family_is_here() -> None:
    families = {family_of(_values(name)).model_type for name in NAMES}
    assert families == {family.model_type for family in FAMILIES.values()} - {"arctic"}


@pytest.mark.parametrize("name", by_default(NAMES, least=True))
def test_what_is_absent_is_as_in_transformers(name: str) -> None:
    """Parsing without a key gives the same as parsing with the default of transformers."""
    other = []
    for lack, values in _lacking(_values(name)):
        try:
            found = family_of(values).parse(values)
        except ModelDataError:
            continue  # refused
        full = _theirs(values)
        if full is None and lack.startswith("null"):
            continue  # transformers refuses null there, so there is nothing to compare
        try:
            same = full is not None and family_of(full).parse(full) == found
        except ModelDataError:
            same = False
        if not same:
            other.append(lack)
    assert other == []


@pytest.mark.parametrize(
    ("name", "settings", "absent"),
    [
        ("gpt-oss", {"max_position_embeddings": 131072}, ("rope_parameters",)),
        ("deepseek-v3", {"n_routed_experts": 16, "n_group": 8, "topk_group": 4}, ("n_group",)),
        ("deepseek-v3", {"n_routed_experts": 16, "n_group": 8, "topk_group": 4}, ("topk_group",)),
        (
            "deepseek-v3",
            {"n_routed_experts": 16, "n_group": 8, "topk_group": 4},
            ("n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob"),
        ),
    ],
)
def test_logits_without_the_keys(
    name: str,
    settings: Values,
    absent: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for key, value in settings.items():
        monkeypatch.setitem(TINY[name].settings, key, value)
    for key in absent:
        monkeypatch.delitem(TINY[name].settings, key, raising=False)
    reference = save_tiny(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(_without(config, *absent)))
    ours = load_resident(tmp_path)
    ids = [(7 * place + 3) % 97 for place in range(50)]
    with torch.no_grad():
        expected = reference(torch.tensor([ids]), use_cache=False).logits[0]
    found = ours.model.extend([(ids, ours.model.new_state(50))], ours.experts, "all")
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("deepseek-v3", "norm_topk_prob", None),  # false in transformers
        ("deepseek-v3", "rope_interleave", None),
        ("deepseek-v3", "n_group", None),
        ("gpt-oss", "sliding_window", None),
        ("olmoe-yarn", "original_max_position_embeddings", 25),  # transformers ignores it
    ],
)
def test_refused_where_transformers_means_another(name: str, key: str, value: object) -> None:
    values = {**_values(name), key: value}
    with pytest.raises(ModelDataError, match=key):
        family_of(values).parse(values)


@pytest.mark.parametrize(
    "key", ["moe_layer_frequency", "parallel_attn_mlp_res", "rope_theta", "num_key_value_heads"]
)
def test_arctic_must_say_what_it_is(key: str) -> None:
    """Its published class has defaults of other models."""
    values = dict(tiny_config("arctic").to_dict())
    family_of(values).parse(values)
    with pytest.raises(ModelDataError, match=key):
        family_of(values).parse(_without(values, key))
