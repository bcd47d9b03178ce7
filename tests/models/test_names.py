"""Test the parsing of tensor names, which come from downloaded files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moeinf.models.base import ExpertPart, ModelDataError, MoeShape
from moeinf.models.families import FAMILIES
from tests.fakes import DictParts
from tests.tiny import TINY, published_config


def config_of(name: str, **changes: Any) -> tuple[Any, Any]:
    family = FAMILIES[TINY[name].family]
    return family, family.parse({**published_config(name), **changes})


def test_mixtral_roles() -> None:
    family, config = config_of("mixtral")
    prefix = "model.layers.1.block_sparse_moe"
    roles = {
        role: family.expert(f"{prefix}.experts.4.{role}.weight", config)
        for role in ("w1", "w2", "w3")
    }
    assert roles == {
        "w1": ExpertPart(1, 4, "gate"),
        "w2": ExpertPart(1, 4, "down"),
        "w3": ExpertPart(1, 4, "up"),
    }
    assert family.expert(f"{prefix}.gate.weight", config) is None


def test_deepseek_counts_only_sparse_layers() -> None:
    """moe_layer_freq 2 after one dense layer: layers 2 and 4 have experts."""
    family, config = config_of(
        "deepseek-lite", num_hidden_layers=6, moe_layer_freq=2, first_k_dense_replace=1
    )
    assert config.moe == MoeShape(layers=2, experts=8, top_k=3, hidden=36, intermediate=22)
    name = "model.layers.{}.mlp.experts.7.up_proj.weight"
    assert family.expert(name.format(2), config) == ExpertPart(0, 7, "up")
    assert family.expert(name.format(4), config) == ExpertPart(1, 7, "up")
    for dense in (0, 1, 3, 5, 6):
        with pytest.raises(ModelDataError, match=f"no expert 7 in layer {dense}"):
            family.expert(name.format(dense), config)
    assert family.expert("model.layers.2.mlp.shared_experts.up_proj.weight", config) is None


def test_qwen3_counts_only_sparse_layers() -> None:
    """Every second layer except 3: layers 1 and 5 have experts."""
    family, config = config_of("qwen3-sparse-step")
    assert config.moe == MoeShape(layers=2, experts=7, top_k=1, hidden=40, intermediate=18)
    name = "model.layers.{}.mlp.experts.6.down_proj.weight"
    assert family.expert(name.format(1), config) == ExpertPart(0, 6, "down")
    assert family.expert(name.format(5), config) == ExpertPart(1, 6, "down")
    for dense in (0, 2, 3, 4, 7):
        with pytest.raises(ModelDataError, match=f"no expert 6 in layer {dense}"):
            family.expert(name.format(dense), config)
    assert family.expert("model.layers.3.mlp.down_proj.weight", config) is None


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.experts.7.gate_proj.weight",  # 7 experts: 0 … 6
        "model.layers.2.mlp.experts.0.gate_proj.weight",  # 2 layers: 0, 1
        "model.layers.00.mlp.experts.0.gate_proj.weight",  # a second spelling of layer 0
        "model.layers.0.mlp.experts.9999999999999999999999.gate_proj.weight",
        "model.layers.0.mlp.experts.٣.gate_proj.weight",  # a digit for \\d, but invalid
        "model.layers.0.mlp.experts.0.gate_proj.weight_scale_inv",  # quantised
        "model.layers.0.mlp.experts.0.gate_proj.weight\n",
        "model.layers.0.mlp.experts.gate_up_proj",  # fused
    ],
)
def test_expert_names_that_do_not_fit(name: str) -> None:
    family, config = config_of("olmoe")
    with pytest.raises(ModelDataError, match="expert"):
        family.expert(name, config)


@pytest.mark.parametrize(
    "tiny", ["mixtral", "olmoe", "deepseek-v3", "glm4", "granite", "phimoe", "qwen2"]
)
@given(name=st.text(alphabet="model.layersxptgaw0123456789_", max_size=60))
def test_any_name_has_an_answer(tiny: str, name: str) -> None:
    family, config = config_of(tiny)
    try:
        part = family.expert(name, config)
    except ModelDataError:
        return
    assert part is None or (0 <= part.layer < config.moe.layers)
    assert family.ignores(name, config) in (True, False)


def test_ignored() -> None:
    family, config = config_of("mixtral")
    _, tied = config_of("mixtral-wide-heads")
    assert family.ignores("model.layers.0.self_attn.rotary_emb.inv_freq", config)
    assert not family.ignores("lm_head.weight", config)
    assert family.ignores("lm_head.weight", tied)
    deepseek, bare = config_of("deepseek-bare")
    _, lite = config_of("deepseek-lite")
    shared = "model.layers.1.mlp.shared_experts.up_proj.weight"
    assert deepseek.ignores(shared, bare)
    assert not deepseek.ignores(shared, lite)


@pytest.mark.parametrize("name", list(TINY))
def test_building_needs_no_data(name: str) -> None:
    """Parts may be on the meta device: a checkpoint is checked so before it is copied."""

    class Shapes(DictParts):
        def tensor(self, name: str, *shape: int) -> Tensor:
            self.used.add(name)
            return torch.empty(shape, device="meta")

    family, config = config_of(name)
    parts = Shapes({})
    model = family.build(config, parts)
    assert model.moe == config.moe
    last = ("model.norm.weight", "model.hyper_connection_mixer.hc_norm.weight")
    assert parts.used.intersection(last)
    assert not any(".experts." in used for used in parts.used)


def test_a_missing_tensor_is_named(make_pair: Callable[[str], Any]) -> None:
    family, config = config_of("olmoe")
    with pytest.raises(ModelDataError, match=r"model\.layers\.0"):
        family.build(config, DictParts({}))


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4", "glm4-lite"])
def test_layers_for_multi_token_prediction_are_left_out(name: str) -> None:
    """num_hidden_layers is 3: one more layer in the checkpoint is valid, a second is not."""
    family, config = config_of(name)
    for tensor in ("mlp.experts.0.up_proj.weight", "eh_proj.weight", "shared_head.head.weight"):
        assert family.expert(f"model.layers.3.{tensor}", config) is None
        assert family.ignores(f"model.layers.3.{tensor}", config)
        assert not family.ignores(f"model.layers.2.{tensor}", config)
    assert not family.ignores("model.layers.4.eh_proj.weight", config)
    with pytest.raises(ModelDataError, match="no expert 0 in layer 4"):
        family.expert("model.layers.4.mlp.experts.0.up_proj.weight", config)
