"""Compare replays with outcomes recorded before the policies were optimised.

The recording is real routing, cut into requests of ten tokens each, so that the EAMC fills. The
outcomes are those of commit 47deca1, for `eamc` with stable sorts and reads ahead that yield.
numpy's default sorts order ties by the processor's vector width, and ties are frequent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from moeinf.offload.policy.base import Policy, Setup
from moeinf.offload.policy.eamc import EamcPolicy
from moeinf.offload.routing.eamc import Eamc
from moeinf.offload.routing.route_csv import read_route_csv
from moeinf.offload.routing.trace import PassBuilder, Phase, Recording, RoutingShape
from moeinf.offload.simulator.cases import Case, run_case
from moeinf.offload.simulator.clock import TimeModel
from moeinf.offload.simulator.outcome import Outcome
from moeinf.offload.simulator.replay import Conditions, Replay
from tests.offload.policy.plain_eamc import PlainEamc

TRACE = Path(__file__).parents[2] / "data" / "traces" / "qwen3-30b-a3b.route.csv.gz"
TOKENS, OF_A_REQUEST = 120, 10


@cache
def routing() -> Recording:
    whole = read_route_csv(TRACE)
    decoded = [done for done in whole.passes if done.phase == "decode"][:TOKENS]
    passes = [
        replace(done, rows=np.full(1, index // OF_A_REQUEST, np.int64))
        for index, done in enumerate(decoded)
    ]
    return Recording("requests", whole.shape, passes)


def sums(outcome: Outcome) -> tuple[int, ...]:
    """Return hits, reads, insertions, prefetches, used prefetches, and the stall in ns."""
    tokens = outcome.tokens
    return (
        sum(t.hits for t in tokens),
        sum(t.reads for t in tokens),
        sum(t.insertions for t in tokens),
        outcome.fetched_ahead,
        outcome.used_ahead,
        round(1e9 * sum(t.stall_seconds for t in tokens)),
    )


RECORDED = {
    ("lru", 0.05): (12887, 21673, 21673, 0, 0, 13788069888),
    ("lru", 0.2): (25285, 9275, 9275, 0, 0, 4992061440),
    ("lfu", 0.05): (12502, 22058, 22058, 0, 0, 14104716288),
    ("lfu", 0.2): (25658, 8902, 8902, 0, 0, 4742648832),
    ("eamc", 0.05): (10998, 27682, 27211, 4377, 947, 15698040218),
    ("eamc", 0.2): (24666, 14729, 13770, 4972, 1186, 5754669739),
    ("adaptive", 0.05): (13031, 21529, 5881, 0, 0, 13702170624),
    ("adaptive", 0.2): (26442, 8118, 8087, 0, 0, 4257251328),
    ("belady", 0.05): (19797, 14763, 14763, 0, 0, 8739345408),
    ("belady", 0.2): (29829, 4731, 4731, 0, 0, 2277758976),
}  # fmt: skip


@pytest.mark.parametrize(("policy", "share"), sorted(RECORDED))
def test_outcomes_are_those_recorded(policy: str, share: float) -> None:
    found = run_case(routing(), Case(policy, share), TimeModel())
    assert sums(found) == RECORDED[policy, share]


def workload(seed: int, encoder_layers: int, users: int) -> Recording:
    """Draw requests of three habits: prompts, then decode passes of up to `users` rows."""
    shape = RoutingShape(4, 8, 2, encoder_layers, 1, 4)
    recording, random = Recording("drawn", shape), np.random.default_rng(seed)
    habits = random.dirichlet(np.full(8, 0.3), size=(3, 4)) + 1e-3

    def add(rows: list[int], phase: Phase, first: int, last: int) -> None:
        builder = PassBuilder(shape, np.array(rows), phase)
        for layer in range(first, last):
            chances = [habits[row % 3, layer] / habits[row % 3, layer].sum() for row in rows]
            ids = [random.choice(8, 2, replace=False, p=p) for p in chances]
            builder.routed(layer, np.array(ids))
        recording.add(builder.end())

    for group in range(6):
        rows = [group * users + user for user in range(users)]
        for row in rows:
            if encoder_layers:
                add([row] * 5, "encode", 0, encoder_layers)
            add([row] * 4, "prefill", encoder_layers, 4)
        for _ in range(8):
            add(rows, "decode", encoder_layers, 4)
    return recording


@pytest.mark.parametrize("encoder_layers", [0, 2])
@pytest.mark.parametrize("users", [1, 3])
@pytest.mark.parametrize("slots", [5, 9, 14])
@pytest.mark.parametrize("late", [False, True])
def test_eamc_decides_as_its_plain_transcription(
    encoder_layers: int, users: int, slots: int, late: bool
) -> None:
    recording = workload(slots, encoder_layers, users)
    conditions = Conditions(slots, TimeModel(ram_over_link=2), late=late)
    ways: list[Callable[[Setup], Policy]] = [EamcPolicy, PlainEamc]
    found = [Replay(recording, way, conditions, Eamc(8, 4, 8)).run() for way in ways]
    assert found[0] == found[1]
    assert (found[0].fetched_ahead == 0) == late  # late policies do not prefetch


# Calls per routed expert; `eamc` took 41 before its core was native.
CALLS = {"lru": 12, "lfu": 13, "eamc": 26, "adaptive": 13, "belady": 12}


@pytest.mark.parametrize(("policy", "most"), sorted(CALLS.items()))
def test_calls_per_routed_expert_are_bounded(policy: str, most: float) -> None:
    """Count calls of Python and C functions: time without a clock."""
    recording = routing()
    calls = 0

    def count(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        outcome = run_case(recording, Case(policy, 0.2), TimeModel())
    finally:
        sys.setprofile(None)
    events = sum(token.events for token in outcome.tokens)
    assert calls / events < most
