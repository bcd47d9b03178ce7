"""The engine's store and the simulator's replay, event for event: what is simulated is what runs.

The store moves only names here: its transfer has every byte at once, and its arithmetic does
nothing. Without reads ahead neither clock matters, so hits, reads and insertions must be equal.
Hinted reads depend on the time of the link, and only the simulator has a link. The store begins all
reads at once. So with hints it is compared with a replay whose link takes no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from moeinf.native import SlotPool
from moeinf.offload.format.layout import ExpertLayout
from moeinf.offload.policy.base import Policy, Setup
from moeinf.offload.policy.table import POLICIES, USE_HINTS
from moeinf.offload.routing.eamc import Eamc
from moeinf.offload.routing.hint_model import HintSource, ModelledHints
from moeinf.offload.routing.route_csv import read_route_csv
from moeinf.offload.routing.trace import PassBuilder, Recording, RoutingShape, Tracer
from moeinf.offload.simulator.clock import TimeModel
from moeinf.offload.simulator.replay import Conditions, Replay
from moeinf.offload.store.expert_store import ExpertStore
from moeinf.offload.store.host_tier import HostTier
from tests.fakes import AtOnce, NoMath

TRACE = Path(__file__).parents[2] / "data" / "traces" / "qwen3-30b-a3b.route.csv.gz"
LAYOUT = ExpertLayout(1, 1, "F32")


@dataclass
class Counts:
    """Counts of decode passes; per token where the replay counts per token."""

    hits: int
    reads: int
    insertions: int


def in_the_store(
    recording: Recording, name: str, slots: int, hints: HintSource | None, prefetches: int
) -> Counts:
    shape = recording.shape
    eamc, tracer = Eamc(64, shape.layers, shape.experts), Tracer(shape)
    policy: Policy = POLICIES[name](Setup(shape, slots, eamc))
    pool = SlotPool(slots, LAYOUT.slot_bytes)
    host = HostTier(
        [LAYOUT] * (shape.layers * shape.experts), shape.experts, pool,
        AtOnce(), policy, NoMath(),  # type: ignore[arg-type]
    )  # fmt: skip
    store = ExpertStore((host,), most_prefetches=prefetches, hints=hints is not None)
    insertions, last = 0, recording.last_pass()
    for index, running in enumerate(recording.passes):
        hinted = hints.of_pass(running) if hints is not None else None
        before = policy.insertions
        store.begin_pass(torch.from_numpy(running.rows), running.phase)
        x, equal = torch.zeros(len(running.rows), 1), torch.ones(running.ids.shape[1:])
        for layer, ids in enumerate(running.ids):
            if (ids < 0).all():
                continue
            weights = equal if running.weights is None else torch.from_numpy(running.weights[layer])
            if hinted is not None and layer + 1 < len(hinted):
                store.hint(layer + 1, torch.from_numpy(hinted[layer + 1]), weights)
            pending = store.submit(layer, x, torch.from_numpy(ids), weights)
            pending.result()
        store.end_pass(torch.from_numpy(running.accepted))
        insertions += (policy.insertions - before) * (running.phase == "decode")
        tracer.add(running)
        for request in running.requests:
            if last[request] == index:
                store.end_request(request)
                eam = tracer.finish(request)
                if eam is not None:
                    eamc.add(eam.prefill, eam.decode)
    store.close()
    return Counts(store.stats.decode_hits, store.stats.decode_loads, insertions)


def in_the_replay(
    recording: Recording, name: str, slots: int, hints: HintSource | None, prefetches: int
) -> Counts:
    shape = recording.shape
    conditions = Conditions(slots, TimeModel(ram_over_link=1e-9), hints)
    eamc = Eamc(64, shape.layers, shape.experts)
    replay = Replay(recording, POLICIES[name], conditions, eamc)
    replay._most_prefetches = prefetches
    tokens = replay.run().tokens
    return Counts(
        sum(t.hits for t in tokens), sum(t.reads for t in tokens), sum(t.insertions for t in tokens)
    )


@cache
def requests() -> Recording:
    """Return twelve requests of three habits, each a prompt of several tokens and an answer."""
    shape = RoutingShape(layers=4, experts=16, top_k=2, expert_bytes=1, dense_bytes=4)
    recording, random = Recording("requests", shape), np.random.default_rng(5)
    for request in range(12):
        habit = random.dirichlet(np.full(16, 0.3), size=(3, 4))[request % 3] + 1e-3
        for rows in (7, *[1] * 9):
            builder = PassBuilder(
                shape, np.full(rows, request), "decode" if rows == 1 else "prefill", weights=True
            )
            for layer, chances in enumerate(habit):
                ids = [
                    random.choice(16, 2, replace=False, p=chances / chances.sum())
                    for _ in range(rows)
                ]
                builder.routed(layer, np.array(ids), random.random((rows, 2), np.float32))
            recording.add(builder.end())
    return recording


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("slots", [9, 20, 40])
def test_demand(name: str, slots: int) -> None:
    recording = requests()
    found = in_the_store(recording, name, slots, None, 0)
    assert found == in_the_replay(recording, name, slots, None, 0)
    assert found.hits + found.reads == 12 * 9 * 4 * 2


@pytest.mark.parametrize("name", ["lru", "adaptive"])
def test_demand_of_a_real_trace(name: str) -> None:
    recording = read_route_csv(TRACE)
    del recording.passes[40:]  # of 129: the cache is full after the first ones
    slots = 18 * recording.shape.layers * recording.shape.experts // 100
    found = in_the_store(recording, name, slots, None, 0)
    assert found == in_the_replay(recording, name, slots, None, 0)


@pytest.mark.matrix
@pytest.mark.parametrize("name", sorted(USE_HINTS))
@pytest.mark.parametrize("slots", [20, 40])
@pytest.mark.parametrize("quality", [1.0, 0.7])
def test_hints(name: str, slots: int, quality: float) -> None:
    recording = requests()
    found = [
        way(recording, name, slots, ModelledHints(quality, quality, 16), 4)
        for way in (in_the_store, in_the_replay)
    ]
    assert found[0] == found[1]
