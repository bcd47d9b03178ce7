"""Recorded routing forced onto the demo: the run equals the recording and the simulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moeinf.offload.policy.table import POLICIES
from moeinf.offload.routing.hint_model import ModelledHints
from moeinf.offload.routing.trace import PassBuilder, Recording, RoutingShape
from moeinf.offload.simulator.replay import Conditions, Replay
from moeinf.offload.store.prefetch_gate import Gate
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.jobs.bench import bench_replay
from moeinf.runtime.jobs.forced_routing import ForcedRouting, OtherShape, fitted, requests
from moeinf.runtime.sizes import parse_memory
from tests.conftest import Open

_SHAPE = RoutingShape(layers=6, experts=32, top_k=4)  # the demo's
_PROMPT, _STEPS = 5, 8


def recorded(shape: RoutingShape = _SHAPE, users: int = 3) -> Recording:
    """Make requests with favourite experts, one after the other.

    One position in ten has no routing.
    """
    recording, random = Recording("recorded", shape), np.random.default_rng(3)
    for request in range(users):
        chances = random.dirichlet(np.full(shape.experts, 0.4), size=shape.layers) + 1e-3
        for rows in (_PROMPT, *[1] * _STEPS):
            phase = "decode" if rows == 1 else "prefill"
            builder = PassBuilder(shape, np.full(rows, request), phase)
            for layer, p in enumerate(chances / chances.sum(1, keepdims=True)):
                ids = np.stack(
                    [
                        random.choice(shape.experts, shape.top_k, replace=False, p=p)
                        for _ in range(rows)
                    ]
                )
                ids[:, -1][random.random(rows) < 0.1] = -1
                builder.routed(layer, ids)
            recording.add(builder.end())
    return recording


def test_the_store_is_asked_for_what_was_recorded(open_engine: Open) -> None:
    engine, recording = open_engine(context=64), recorded()
    again = engine.record("again")
    bench_replay(engine, requests(recording), None, rounds=1)
    assert len(again.passes) == len(recording.passes) == 3 * (1 + _STEPS)
    for mine, theirs in zip(again.passes, recording.passes, strict=True):
        assert mine.phase == theirs.phase
        np.testing.assert_array_equal(mine.ids, theirs.ids)


def test_a_long_prompt_comes_in_several_passes(open_engine: Open) -> None:
    """PREFILL_CHUNK splits the prompt; the recorded pass is split with it."""
    engine, recording = open_engine(context=64), recorded()
    again, state = engine.record("again"), engine.new_state()
    with engine.routed_through(ForcedRouting) as forced:
        forced.play(recording.passes[0])
        engine.extend(state, [1, 2])
        engine.extend(state, [3, 4, 5])
    ids = np.concatenate([done.ids for done in again.passes], 1)
    np.testing.assert_array_equal(ids, recording.passes[0].ids)


def untraced(open_engine: Open, policy: str) -> Engine:
    """Open an engine like `bench --replay`, with the folder and manifest of open_engine."""
    other = open_engine(context=64)
    config = EngineConfig(memory=parse_memory("30%"), context=64, policy=policy, trace=False)
    return Engine.open(
        other.info.manifest, other.info.folder, config, Settings(other.info.folder.parents[2])
    )


@pytest.mark.parametrize("policy", ["lru", "lfu", "lrfu", "arc", "s3-fifo", "sieve"])
def test_hits_are_those_of_the_simulator(open_engine: Open, policy: str) -> None:
    with untraced(open_engine, policy) as engine:
        recording = fitted(recorded(), engine.info.manifest)
        slots = engine.info.slots
        measured = bench_replay(engine, requests(recording), None, rounds=1)
    replayed = Replay(recording, POLICIES[policy], Conditions(slots)).run()
    assert measured.steps == len(replayed.tokens) == 3 * _STEPS
    assert measured.decode.decode_hits == sum(token.hits for token in replayed.tokens)
    assert measured.decode.decode_loads == sum(token.reads for token in replayed.tokens)
    assert measured.decode.hit_rate == replayed.hit_rate


@pytest.mark.parametrize("policy", ["fmoe", "promoe"])
def test_a_predictor_is_given_the_gates_weights(open_engine: Open, policy: str) -> None:
    """They are the weights of this model's router, as many as forced experts."""
    with untraced(open_engine, policy) as engine:
        seen, told = list[np.ndarray](), engine.store.host.policy.routed

        def noted(layer: int, ids: np.ndarray, weights: np.ndarray | None = None) -> None:
            assert weights is not None
            assert weights.shape == ids.shape
            seen.append(weights)
            told(layer, ids, weights)

        engine.store.host.policy.routed = noted  # type: ignore[method-assign]
        recording = fitted(recorded(), engine.info.manifest)
        measured = bench_replay(engine, requests(recording), None, rounds=1)
    assert measured.steps == 3 * _STEPS
    assert len(seen) == len(recording.passes) * recording.shape.layers
    assert min(weights.min() for weights in seen) > 0
    assert len({float(weights.max()) for weights in seen}) > len(seen) // 2


def test_hints_are_the_sources(open_engine: Open) -> None:
    """An exact gate leaves few misses; the model's own gates cannot predict the recording."""
    hits = {}
    for recall in (None, 1.0):
        with untraced(open_engine, "adaptive") as engine:
            engine.store._gate = Gate(0.0, tries=False)
            recording = fitted(recorded(), engine.info.manifest)
            source = None if recall is None else ModelledHints(recall, recall, 32)
            measured = bench_replay(engine, requests(recording), source, rounds=1)
        hits[recall] = measured.decode
    assert hits[None].decode_hits_hinted == hits[None].ahead_bytes_read == 0
    assert hits[1.0].ahead_bytes_used > 0
    assert hits[1.0].ahead_accuracy == 1.0


def test_fewer_layers_and_sizes_of_the_model(open_engine: Open) -> None:
    manifest = open_engine(context=64).info.manifest
    found = fitted(recorded(replace(_SHAPE, layers=9)), manifest)
    assert found.shape == replace(
        _SHAPE, expert_bytes=manifest.expert_bytes, dense_bytes=manifest.dense_bytes
    )
    assert {done.ids.shape[0] for done in found.passes} == {6}


@pytest.mark.parametrize("other", [{"layers": 5}, {"experts": 16}, {"top_k": 5}])
def test_other_shapes_are_refused(open_engine: Open, other: dict[str, int]) -> None:
    manifest = open_engine(context=64).info.manifest
    with pytest.raises(OtherShape, match="demo:bf16 has 6 of 32, 4 per token"):
        fitted(recorded(replace(_SHAPE, **other)), manifest)


def test_a_recording_without_decoding_is_refused() -> None:
    recording = recorded()
    del recording.passes[1:]
    with pytest.raises(OtherShape, match="decodes nothing"):
        requests(recording)
