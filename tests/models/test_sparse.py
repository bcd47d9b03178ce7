"""DeepSeek-V3.2 and GLM-5: dense attention up to index_topk tokens, and layers without indexers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moeinf.models.base import ModelDataError
from moeinf.models.families import FAMILIES, family_of
from tests.fakes import from_tensors
from tests.models.conftest import Pair
from tests.tiny import tiny_config

Make = Callable[[str], Pair]


def test_up_to_the_border_it_is_deepseek_v3(make_pair: Make) -> None:
    """The same weights in both families: the same bits of 33 tokens, and other ones after."""
    pair = make_pair("v32")
    values = json.loads((pair.folder / "config.json").read_text())
    tensors = load_file(pair.folder / "model.safetensors")
    plain = {name: tensor for name, tensor in tensors.items() if ".indexer." not in name}
    dense = from_tensors({**values, "model_type": "deepseek_v3"}, plain)
    sparse = from_tensors({**values, "index_topk": 33}, tensors)
    states = [one.model.new_state(60) for one in (dense, sparse)]
    for start, stop in ((0, 20), (20, 32), (32, 33)):
        found = [
            one.model.extend([(pair.ids[start:stop], state)], one.experts, "all")
            for one, state in zip((dense, sparse), states, strict=True)
        ]
        assert torch.equal(*found)
    found = [
        one.model.extend([(pair.ids[33:], state)], one.experts, "all")
        for one, state in zip((dense, sparse), states, strict=True)
    ]
    assert (found[0] - found[1]).abs().amax() > 0.1 * found[0].abs().amax()


@pytest.mark.parametrize("name", ["v32", "glm-dsa"])
def test_decode_across_the_border(make_pair: Make, name: str) -> None:
    """Three requests decode together, two across it; one goes back and crosses again."""
    pair = make_pair(name)
    model, experts, top = pair.ours.model, pair.ours.experts, pair.ours.config.indexer.top
    states = [model.new_state(60) for _ in range(3)]
    for state, begun in zip(states, (top - 3, top - 1, top + 4), strict=True):
        model.extend([(pair.ids[:begun], state)], experts)
    for step in range(8):
        places = [state.length for state in states]
        batch = [([pair.ids[at]], state) for at, state in zip(places, states, strict=True)]
        for row, at in zip(model.extend(batch, experts), places, strict=True):
            pair.assert_close(row[None], at)
        if step == 4:
            states[0].truncate(top - 2)
            states[2] = states[2].snapshot()


def test_layers_that_use_another_layers_choice() -> None:
    """GLM-5.2's keys: each fourth layer from the third one on has an indexer."""
    values: dict[str, Any] = tiny_config("glm-dsa-full").to_dict()
    values |= {"num_hidden_layers": 11, "mlp_layer_types": None}
    del values["indexer_types"], values["layer_types"]
    family = FAMILIES["glm_moe_dsa"]
    assert family.parse(values).indexed == tuple(range(11))
    some = family.parse({**values, "index_topk_freq": 4, "index_skip_topk_offset": 3})
    assert some.indexed == (0, 1, 2, 6, 10)
    name = "model.layers.{}.self_attn.indexer.wk.weight"
    assert [family.ignores(name.format(layer), some) for layer in (2, 3, 6, 7)] == [
        *(False, True, False, True),
    ]
    assert family.ignores("model.layers.11.self_attn.indexer.wk.weight", some)  # multi-token
    with pytest.raises(ModelDataError, match="first layer has no indexer"):
        family_of(values).parse({**values, "indexer_types": ["shared"] + ["full"] * 10})
