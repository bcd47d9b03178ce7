"""Test `--route cache-aware`: its effect on an engine, and the models that it refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moeinf.models.layers import cache_aware
from moeinf.runtime.config import EngineConfig, LossyReproducible
from moeinf.runtime.engine.cache_routing import CannotRoute, check_route
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.chat import Conversation
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.prefix.opening import _identity
from moeinf.runtime.requests import Limits
from moeinf.runtime.sampling.sampler import SamplingOptions
from moeinf.runtime.sizes import parse_memory
from tests.conftest import Open
from tests.runtime.engine.test_families import pulled

PROMPTS = ("17+25=", "sort owl, fig, zebra, ant", "4091 in words")
GREEDY = SamplingOptions(temperature=0)


def tokens(engine: Engine, limit: int = 40) -> list[list[int]]:
    answers = [Conversation(engine).ask(text, GREEDY, Limits(max_tokens=limit)) for text in PROMPTS]
    for answer in answers:
        list(answer)
    return [answer.tokens for answer in answers]


def test_the_hit_rate_rises_with_lambda(open_engine: Open) -> None:
    """A pass of ids that are given, so that each engine decodes the same tokens."""
    ids = [16 + 7 * i % 200 for i in range(60)]
    rates, rerouted = list[float](), list[float]()
    for bonus in (0.0, 0.1, 0.5):
        engine = open_engine(memory="30%", cache_aware=bonus, policy="lru")
        state = engine.new_state()
        for one in ids:
            engine.all_logits(state, [one])
        stats = engine.store.stats
        rates.append(stats.hit_rate or 0.0)
        rerouted.append(stats.rerouted_share or 0.0)
        assert engine.info.lossy == ({"skip_below": 0.0, "cache_aware": bonus} if bonus else {})
    assert rates[0] + 0.02 < rates[1] < rates[2], rates
    assert rerouted[0] == 0 < rerouted[1] < rerouted[2]


def test_a_model_that_fits_answers_exactly(open_engine: Open) -> None:
    engine = open_engine(cache_aware=0.5)
    assert tokens(engine) == tokens(open_engine())
    assert engine.store.stats.decode_events_rerouted == 0
    assert "lossy: with --route cache-aware=0.5" in " ".join(engine.take_notes())
    assert not engine.tracing.on, "its choice must not enter the EAMC"


def test_exact_engines_have_no_such_router(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_aware.CacheAwareRouter, "__call__", None)
    assert len(tokens(open_engine(memory="30%"), limit=4)) == len(PROMPTS)


def test_both_lossy_options_together(open_engine: Open) -> None:
    engine = open_engine(memory="30%", cache_aware=0.3, skip_below=0.3)
    assert len(tokens(engine, limit=20)) == len(PROMPTS)
    stats = engine.store.stats
    assert stats.decode_events_rerouted > 0 < stats.decode_events_skipped
    assert engine.store.idle


@pytest.mark.parametrize("name", ["deepseek-groups", "deepseek-v3", "gpt-oss", "qwen3"])
def test_families_route_by_their_cache(name: str, tmp_path: Path) -> None:
    """A family's answer is another than that of transformers only where an expert was replaced."""
    settings, manifest, prompt, _ = pulled(name, tmp_path, 1)
    memory = parse_memory(str(manifest.slots.min_bytes))
    folder = Library(settings).folder(manifest.model)
    counts = []
    for bonus in (0.0, 1.0):
        config = EngineConfig(memory=memory, cache_aware=bonus)
        with Engine.open(manifest, folder, config, settings) as engine:
            state = engine.new_state()
            for one in prompt:
                assert engine.all_logits(state, [one]).isfinite().all()
            counts.append(engine.store.stats.decode_events_rerouted)
    assert counts[0] == 0 < counts[1]


@pytest.mark.parametrize("name", ["phimoe", "gpt-oss-one-expert", "gpt-oss-all-experts"])
def test_refused_families(name: str, tmp_path: Path) -> None:
    settings, manifest, _, _ = pulled(name, tmp_path, 1)
    folder = Library(settings).folder(manifest.model)
    with pytest.raises(CannotRoute, match="--route cache-aware: tiny:f32"):
        Engine.open(manifest, folder, EngineConfig(cache_aware=0.2), settings)


def test_an_encoder_decoder_is_refused() -> None:
    about = SimpleNamespace(encoder_layers=2, top_k=2, experts=8, family="nllb-moe", model="x")
    with pytest.raises(CannotRoute, match="encoder-decoder"):
        check_route(cast(Manifest, about))


LOSSY: list[dict[str, Any]] = [{"cache_aware": 0.2}, {"skip_below": 0.03}]


@pytest.mark.parametrize("lossy", LOSSY)
def test_what_a_lossy_option_refuses(lossy: dict[str, Any]) -> None:
    with pytest.raises(LossyReproducible, match="--reproducible"):
        EngineConfig(**lossy, reproducible=True)
    with pytest.raises(InvalidValue, match="--device cuda"):
        EngineConfig(**lossy, device="cuda")
    for bad in (-0.1, 1.1, float("nan")):
        with pytest.raises(InvalidValue):
            EngineConfig(**dict.fromkeys(lossy, bad))


@pytest.mark.parametrize("lossy", LOSSY)
def test_an_exact_engine_does_not_reuse_lossy_kv(lossy: dict[str, Any], open_engine: Open) -> None:
    engine = open_engine()
    layout, info = engine.new_state().layout, engine.info  # type: ignore[attr-defined]
    about = (layout, info.manifest, info.placement)
    assert _identity(*about, EngineConfig()) == _identity(*about, EngineConfig())
    assert _identity(*about, EngineConfig()) != _identity(*about, EngineConfig(**lossy))
