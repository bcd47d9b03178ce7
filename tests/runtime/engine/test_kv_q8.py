"""Test `--kv q8` in an engine: memory, companions, the prefix cache, and what it refuses."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from moeinf.models.layers.kv_cache import KvCache
from moeinf.runtime.config import EngineConfig, PrefixBudget
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.prefix.opening import _identity
from tests.conftest import Open
from tests.runtime.engine.test_cache_routing import tokens


@pytest.mark.parametrize("model", ["demo", "demo:f32"])
def test_memory_does_not_choose_the_tokens(model: str, open_engine: Open) -> None:
    full = open_engine(model, kv="q8")
    answers = tokens(full)
    assert answers[0] == tokens(open_engine(model))[0], "the demo is sure of a sum"
    assert tokens(open_engine(model, memory="30%", kv="q8")) == answers
    state = full.new_state()
    assert isinstance(state, KvCache)
    per_token = state.layout.bytes_per_token
    assert per_token == full.info.manifest.kv_token_bytes("q8")
    assert full.info.placement.kv_bytes == full.info.context * per_token
    assert 2 * per_token < 1.07 * full.info.manifest.kv_bytes_per_token


def test_companions_do_not_change_a_token(open_engine: Open) -> None:
    engine = open_engine(kv="q8", context=64)
    ids = [16 + 7 * i % 200 for i in range(30)]

    def last(others: int) -> torch.Tensor:
        states = [engine.new_state() for _ in range(1 + others)]
        for number, state in enumerate(states):
            engine.model.extend([(ids[number:], state)], engine.store)
        batch = [([20 + number], state) for number, state in enumerate(states)]
        return engine.model.extend(batch, engine.store)[0]

    assert torch.equal(last(0), last(2))


def test_kv_of_another_form_never_matches(open_engine: Open) -> None:
    engines = [open_engine(kv=form, context=64) for form in ("full", "q8")]
    roots = set[bytes]()
    for engine in engines:
        layout, info = cast(Any, engine.new_state()).layout, engine.info
        roots.add(_identity(layout, info.manifest, info.placement, EngineConfig()))
    assert len(roots) == 2


def test_a_restored_prefix_has_the_same_bytes(open_engine: Open) -> None:
    engine = open_engine(kv="q8", context=512, prefix=PrefixBudget(1 << 24, 0))
    ids = [16 + 7 * i % 200 for i in range(500)]
    state, back = engine.new_state(), engine.new_state()
    assert isinstance(state, KvCache)
    assert isinstance(back, KvCache)
    engine.extend(state, ids)
    prefixes = engine.prefixes
    assert prefixes is not None
    prefixes.keep(state, ids)
    assert prefixes.bytes_used == 500 * engine.info.manifest.kv_token_bytes("q8")
    assert prefixes.restore(back, prefixes.find([*ids, 1])) == 500
    for mine, its in zip(state.columns(0, 500), back.columns(0, 500), strict=True):
        assert torch.equal(mine, its)


def test_a_gpu_is_refused() -> None:
    with pytest.raises(InvalidValue, match="--kv q8 cannot be combined with --device cuda"):
        EngineConfig(kv="q8", device="cuda")
