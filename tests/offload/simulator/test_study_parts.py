"""Test the study's policies and workloads (scripts/study_parts.py), on synthetic routing."""

from __future__ import annotations

import numpy as np
import pytest

from moeinf.offload.policy.base import Setup
from moeinf.offload.policy.table import POLICIES
from moeinf.offload.routing.hint_model import RecordedHints
from moeinf.offload.routing.trace import PassBuilder, Recording, RoutingShape
from scripts import study_parts as parts
from scripts.study_policies import ABLATED, COMPARED, Case, Decayed, Gate, LruVictims, Way

_SHAPE = RoutingShape(3, 16, 2, 0, 1 << 20, 1 << 20)


def recording(requests: int, tokens: int, kinds: int = 2, seed: int = 0) -> Recording:
    """Draw requests; each kind prefers different experts, and the hints are correct."""
    random = np.random.default_rng(seed)
    made = Recording("drawn", _SHAPE)
    names = ("add", "subtract", "upper", "reverse")
    for request in range(requests):
        kind = request % kinds
        made.labels[request] = names[kind]
        for token in range(tokens + 1):
            phase = "decode" if token else "prefill"
            built = PassBuilder(_SHAPE, np.array([request]), phase)
            ids = [random.permutation(6)[:2] + 3 * kind for _ in range(_SHAPE.layers)]
            for layer, chosen in enumerate(ids):
                built.routed(layer, chosen[None])
                if layer + 1 < _SHAPE.layers:
                    built.hint(layer + 1, ids[layer + 1][None])
            made.add(built.end())
    return made


def setup(slots: int) -> Setup:
    return Setup(_SHAPE, slots)


def test_decayed_counts_forget() -> None:
    policy = Decayed(setup(2))
    row = np.zeros(1, np.int64)
    for chosen in ([[0, 1]], [[0, 2]], [[2, 3]]):
        policy.begin_pass(row, "decode")
        policy.routed(0, np.array(chosen))
        for cell in chosen[0]:
            policy.admitted(cell)
    # 0: .95² + .95, 1: .95², 2: .95 + 1, 3: 1
    assert policy.victim(lambda _: True) == 1
    assert policy.victim(lambda cell: cell != 3) == 0
    assert policy.victim(lambda _: True) == 3
    assert policy.victim(lambda _: True) == 2
    assert policy.victim(lambda _: True) is None


def test_a_gate_wishes_what_is_not_there() -> None:
    policy = Gate(setup(4))
    policy.admitted(16)
    policy.hinted(1, np.array([[0, 3]]))
    assert [wish.cell for wish in policy.prefetch(8)] == [19]
    policy.routed(1, np.array([[0, 3]]))
    assert list(policy.prefetch(8)) == []


def test_lru_chooses_victims_for_adaptive() -> None:
    policy = LruVictims(setup(3))
    for cell in (5, 6, 7):
        policy.admitted(cell)
    policy.routed(0, np.array([[5, 7]]))
    assert policy.victim(lambda _: True) == 6
    assert policy.insertions >= 0  # an attribute of adaptive


def test_ways_see_hints_only_where_they_should() -> None:
    """Correct hints save stalls; no policy beats the offline optimum."""
    drawn = recording(6, 12)
    case = Case(drawn, 0.25, RecordedHints())
    adaptive = POLICIES["adaptive"]
    told = case.run(Way("", adaptive, hints=True))
    blind = case.run(Way("", adaptive))
    assert told.stall_ms_per_token < blind.stall_ms_per_token
    best = case.best().hit_rate
    for way in (*COMPARED, *ABLATED):
        if not way.hints:  # prefetching can hit more often than any eviction alone
            assert case.run(way).hit_rate <= best, way.name
    assert parts.hints_of(Recording("none", _SHAPE)) is not None


def test_workloads() -> None:
    drawn = recording(8, 6, kinds=4)
    longer = parts.as_conversations(drawn, 4)
    assert longer.requests == [0, 4]
    assert longer.decode_tokens == drawn.decode_tokens
    shares = parts.sparsity_of_many(drawn, (1, 8))
    assert shares[1][0] < shares[8][0] <= 1
    assert shares[8][1] <= shares[8][0]
    shifts = parts.shifts(drawn, 0.25)
    assert len(shifts["within a group"]) == 4  # add, subtract and upper, reverse: both ways
    assert len(shifts["from group to group"]) == 2
    assert len(parts.between([drawn, recording(4, 6, seed=1)], 0.25)) == 2
    with pytest.raises(ValueError, match="different models"):
        parts.between([drawn, Recording("other", RoutingShape(2, 8, 2))], 0.25)
    rates = parts.by_place(drawn, 0.25, Way("", POLICIES["lru"]), 3)
    assert len(rates) == 2
    assert all(0 <= rate <= 1 for rate in rates)


def test_every_knob_has_its_default_among_its_values() -> None:
    from moeinf.offload.policy.adaptive import AdaptiveKnobs
    from moeinf.offload.policy.eamc import EamcKnobs

    for values, knobs in (
        (parts.ADAPTIVE_VALUES, AdaptiveKnobs()),
        (parts.EAMC_VALUES, EamcKnobs()),
    ):
        assert set(values) == set(vars(knobs))
        for knob, tried in values.items():
            assert getattr(knobs, knob) in tried, knob
