"""Test the times of a replay with a device, computed by hand, and the floor of each token.

test_tiered_store_is_the_replay.py compares its counts with the real store.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeinf.offload.gpu_tier.miss_split import MISSES, Miss
from moeinf.offload.policy.table import POLICIES
from moeinf.offload.routing.hint_model import ModelledHints
from moeinf.offload.routing.route_csv import read_route_csv
from moeinf.offload.routing.trace import PassBuilder, Recording, RoutingShape
from moeinf.offload.simulator.clock import DeviceSpeeds, TimeModel
from moeinf.offload.simulator.outcome import Outcome
from moeinf.offload.simulator.replay import Conditions
from moeinf.offload.simulator.simulated_device import Above
from moeinf.offload.simulator.tiered_replay import TieredReplay

TRACE = Path(__file__).parents[2] / "data" / "traces" / "gemma-4-26b-a4b.route.csv.gz"

# Per expert: read 20 s, copy 4 s, compute 10 s on the CPU and 1 s on the device. A layer's dense
# share takes 1 s.
SHAPE = RoutingShape(layers=2, experts=4, top_k=2, expert_bytes=20, dense_bytes=40)
READS = TimeModel(ram_over_link=1, ram_bytes_per_s=1)
SPEEDS = DeviceSpeeds(bus_bytes_per_s=5, cpu_bytes_per_s=2, device_bytes_per_s=20)


def decode(*tokens: list[list[int]]) -> Recording:
    recording = Recording("hand", SHAPE)
    for layers in tokens:
        builder = PassBuilder(SHAPE, np.zeros(1, np.int64), "decode")
        for layer, ids in enumerate(layers):
            builder.routed(layer, np.array([ids]))
        recording.add(builder.end())
    return recording


def replayed(recording: Recording, miss: Miss, device: int = 4, share: float = 0.5) -> Outcome:
    above = Above(device, miss, SPEEDS, share)
    return TieredReplay(recording, POLICIES["lru"], Conditions(8, READS), above).run()


def test_fetch() -> None:
    """Token 1 reads all experts, token 2 finds them on the device.

    Token 1, layer 0: dense 0-1; read until 21 and 41. Each is copied in 4 after it arrives and
    computed in 1. Sum: 46, of which 43 are stall. Layer 1 reads the same two again: 46.
    Token 2: all four are on the device, 3 s a layer.
    """
    outcome = replayed(decode([[0, 1], [0, 1]], [[0, 1], [0, 1]]), "fetch")
    assert [token.seconds for token in outcome.tokens] == [92, 6]
    assert [token.stall_seconds for token in outcome.tokens] == [86, 0]
    assert [token.copies for token in outcome.tokens] == [4, 0]
    assert outcome.device_hit_rate == 0.5
    assert outcome.host_hit_rate == 0
    assert outcome.bus_bytes_per_token == 40
    assert outcome.bytes_read_per_token == 40


def test_compute_and_promotion() -> None:
    """Token 1 computes on the CPU and promotes, token 2 hits.

    Token 1, layer 0: reads until 21 and 41, each computed in 10: 51, and the two are promoted until
    59. Layer 1: dense until 52, reads until 72 and 92, computed at 102, promoted until 110.
    Token 2, layer 0 at 103 hits both, whose copies have ended: 105. Layer 1 at 106: the copies are
    in flight; the device has them at 110, done at 112.
    """
    outcome = replayed(decode([[0, 1], [0, 1]], [[0, 1], [0, 1]]), "compute")
    assert [token.seconds for token in outcome.tokens] == [102, 10]
    assert [token.stall_seconds for token in outcome.tokens] == [96, 4]
    assert [token.cpu_events for token in outcome.tokens] == [4, 0]
    assert [token.copies for token in outcome.tokens] == [4, 0]


def test_auto_divides_what_the_host_has() -> None:
    """One device slot, bus and CPU equally fast.

    Token 1 fetches each expert when it arrives from the disk. Token 2 begins with everything in the
    host. Layer 0: dense 0-1; one is fetched from 1 to 5 and computed at 6. The CPU computes the
    other until 11, and it is promoted until 15. Layer 1: dense 11-12; with one copy in flight both
    choices end at the same time. So one is fetched from 15 to 19 and computed at 20, and the CPU is
    done at 22.
    """
    outcome = replayed(decode([[0, 1], [2, 3]], [[0, 1], [2, 3]]), "auto", device=1)
    first, second = outcome.tokens
    assert (first.hits, first.cpu_events, first.copies) == (0, 0, 4)
    assert (second.hits, second.device_hits, second.cpu_events, second.copies) == (4, 0, 2, 4)
    assert second.seconds == 22
    assert second.floor_seconds == pytest.approx(2 + 4 * 20 / (5 + 2))


def test_nothing_is_promoted_while_the_bus_is_busy() -> None:
    """Two device slots, 25 s a copy.

    Token 1 reads: layer 0 is done at 51, and promoted until 101. Layer 1 is done at 102, when the
    bus is idle again: promoted until 152, and the others are evicted.
    Token 2: the CPU computes layer 0, 103 to 123, without promotion. Layer 1 waits until 152.
    Token 3: layer 0 is promoted at 175.
    """
    slow = DeviceSpeeds(bus_bytes_per_s=20 / 25, cpu_bytes_per_s=2, device_bytes_per_s=20)
    recording = decode(*[[[0, 1], [2, 3]]] * 3)
    conditions, above = Conditions(8, READS), Above(2, "compute", slow)
    outcome = TieredReplay(recording, POLICIES["lru"], conditions, above).run()
    assert [token.copies for token in outcome.tokens] == [4, 0, 2]
    assert [token.device_hits for token in outcome.tokens] == [0, 2, 0]
    assert [token.seconds for token in outcome.tokens] == [102, 52, 42]


@pytest.fixture(scope="module")
def recorded() -> Recording:
    """Return the first 20 passes of a real model."""
    recording = read_route_csv(TRACE)
    del recording.passes[20:]
    return recording


@pytest.mark.matrix
@pytest.mark.parametrize("miss", MISSES)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_nothing_is_below_its_floor(policy: str, miss: Miss, recorded: Recording) -> None:
    cells = recorded.shape.layers * recorded.shape.experts
    floors = []
    for device, ratio, hints in ((0.05, 8, 0.0), (0.3, 2, 0.9)):
        gate = ModelledHints(hints, hints, recorded.shape.experts) if hints else None
        conditions = Conditions(round(0.5 * cells), TimeModel(ratio), gate)
        above = Above(round(device * cells), miss)
        outcome = TieredReplay(recorded, POLICIES[policy], conditions, above).run()
        for token in outcome.tokens:
            assert token.seconds >= token.floor_seconds > 0
            assert token.stall_seconds >= 0
            assert token.device_hits <= token.hits <= token.events
        floors.append(outcome.floor_ms_per_token)
    assert floors[1] < floors[0]
