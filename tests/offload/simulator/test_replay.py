"""Test the simulator on replays computed by hand, and the study's targets on real traces."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from moeinf.offload.policy.adaptive import Adaptive
from moeinf.offload.policy.base import Policy, Setup
from moeinf.offload.policy.belady import Belady
from moeinf.offload.policy.lru import Lru
from moeinf.offload.policy.table import POLICIES
from moeinf.offload.routing import route_csv
from moeinf.offload.routing.eamc import Eamc
from moeinf.offload.routing.hint_model import ModelledHints, RecordedHints
from moeinf.offload.routing.route_csv import BadRouteTrace, read_route_csv
from moeinf.offload.routing.trace import PassBuilder, Recording, RoutingShape
from moeinf.offload.simulator.clock import TimeModel
from moeinf.offload.simulator.outcome import Outcome
from moeinf.offload.simulator.replay import Conditions, Replay

TRACES = Path(__file__).parents[2] / "data" / "traces"

# One second per byte of RAM. Per expert: compute 1 s, read 4 s. Dense: 1 s per layer.
SHAPE = RoutingShape(layers=2, experts=4, top_k=2, expert_bytes=1, dense_bytes=2)
CLOCK = TimeModel(ram_over_link=4, ram_bytes_per_s=1)


def decode(*tokens: list[list[int]], hints: bool = False) -> Recording:
    """Record decode tokens, each as its layers' ids; hints: with perfect recorded hints."""
    recording = Recording("hand", SHAPE)
    for layers in tokens:
        builder = PassBuilder(SHAPE, np.zeros(1, np.int64), "decode")
        for layer, ids in enumerate(layers):
            builder.routed(layer, np.array([ids]))
            if hints and layer:
                builder.hint(layer, np.array([ids]))
        recording.add(builder.end())
    return recording


def test_stall_by_hand() -> None:
    """Token 1 reads everything, token 2 misses one expert.

    Token 1, layer 0: dense 0-1, reads end at 5 and 9, computed at 10: 7 s over its 2 s.
    Layer 1: dense 10-11, the same: 7 s.
    Token 2, layer 0 hits both, no stall. Layer 1 hits one (computed meanwhile) and reads one for
    4 s, computed after 5: 3 s over its 2 s.
    """
    recording = decode([[0, 1], [0, 1]], [[0, 1], [0, 2]])
    outcome = Replay(recording, Lru, Conditions(8, CLOCK)).run()
    assert [token.stall_seconds for token in outcome.tokens] == [14, 3]
    assert [token.seconds for token in outcome.tokens] == [20, 9]
    assert (outcome.hit_rate, outcome.reads_per_token) == (3 / 8, 2.5)
    assert outcome.bytes_read_per_token == 2.5
    assert outcome.prefetch_precision is None


def test_hints_are_read_while_computing() -> None:
    """Adaptive with a perfect gate.

    Layer 0's demand reads occupy the link until 9. Then layer 1's experts are read, the first until
    13, and layer 1 routes at 11. The second begins at 13, ends at 17, computed at 18: 5 s over its
    2 s. Demand reads alone would take 7.
    """
    recording = decode([[0, 1], [0, 1]], hints=True)
    conditions = Conditions(8, CLOCK, RecordedHints())
    outcome = Replay(recording, POLICIES["adaptive"], conditions).run()
    assert outcome.tokens[0].stall_seconds == 7 + 5
    assert outcome.tokens[0].reads == 4
    assert (outcome.prefetch_precision, outcome.prefetch_recall) == (1, 1 / 4)


def test_the_cliff() -> None:
    """Four experts in turn through three slots: LRU has no hits, Belady has."""
    shape = RoutingShape(layers=4, experts=2, top_k=1, expert_bytes=1)
    recording = Recording("cycle", shape)
    for _ in range(8):
        builder = PassBuilder(shape, np.zeros(1, np.int64), "decode")
        builder.ids[:] = 0
        recording.add(builder.end())
    future = [(layer, p.ids[layer]) for p in recording.passes for layer in range(4)]
    assert Replay(recording, Lru, Conditions(3, CLOCK)).run().hit_rate == 0
    assert Replay(recording, lambda s: Belady(s, future), Conditions(3, CLOCK)).run().hit_rate > 0.3
    assert Replay(recording, POLICIES["adaptive"], Conditions(3, CLOCK)).run().hit_rate > 0.2


def test_finished_requests_join_the_collection() -> None:
    eamc = Eamc(4, 2, 4)
    Replay(decode([[0, 1], [0, 1]]), Lru, Conditions(8, CLOCK), eamc).run()
    assert len(eamc) == 1
    assert eamc.entry(0).decode.tolist() == [[1, 1, 0, 0], [1, 1, 0, 0]]


def test_a_collection_that_begins_empty_is_used_once_it_fills() -> None:
    """Requests of one kind: from the second on, the EAMC predicts the experts of a token."""
    recording = Recording("alike", SHAPE)
    for request in range(6):
        for step in range(5):
            builder = PassBuilder(SHAPE, np.array([request]), "decode" if step else "prefill")
            builder.ids[:] = [0, 1]
            recording.add(builder.end())
    replay = Replay(recording, POLICIES["adaptive"], Conditions(6, CLOCK), Eamc(4, 2, 4))
    replay.run()
    policy = replay.policy
    assert isinstance(policy, Adaptive)
    assert policy.core.past.tolist() == [[1, 1, 0, 0], [1, 1, 0, 0]]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8])
def test_any_policy_any_size(name: str, slots: int) -> None:
    """A prefill of more experts than slots, late events, hints: all reads are counted.

    A second replay decides the same.
    """
    random = np.random.default_rng(slots)
    recording = Recording("random", SHAPE)
    for request in range(4):
        for step in range(5):
            rows = np.full(1 if step else 6, request)
            builder = PassBuilder(SHAPE, rows, "decode" if step else "prefill", weights=True)
            for layer in range(2):
                ids = random.permuted([[0, 1, 2, 3]] * len(rows), axis=1)[:, :2]
                builder.routed(layer, ids, random.random(ids.shape))
            recording.add(builder.end())
    for late in (False, True):
        hints = ModelledHints(0.7, 0.5, 4)
        conditions = Conditions(slots, CLOCK, hints, late)
        replay = Replay(recording, POLICIES[name], conditions, Eamc(3, 2, 4))
        outcome = replay.run()
        assert len(outcome.tokens) == 16
        misses = sum(token.events - token.hits for token in outcome.tokens)
        assert sum(token.reads for token in outcome.tokens) >= misses - outcome.used_ahead
        assert len(replay._resident) + len(replay._link.arriving) <= slots
        assert outcome.stall_ms_per_token >= 0
        again = Conditions(slots, CLOCK, ModelledHints(0.7, 0.5, 4), late)
        assert Replay(recording, POLICIES[name], again, Eamc(3, 2, 4)).run() == outcome


def test_modelled_hints_have_their_recall_and_precision() -> None:
    shape = RoutingShape(layers=40, experts=64, top_k=6)
    builder = PassBuilder(shape, np.zeros(1, np.int64), "decode")
    random = np.random.default_rng(0)
    for layer in range(40):
        builder.routed(layer, random.permutation(64)[None, :6])
    done = builder.end()
    hints = ModelledHints(0.8, 0.6, 64).of_pass(done)
    assert hints is not None
    right = sum(
        len(set(h[h >= 0]) & set(i)) for h, i in zip(hints[:, 0], done.ids[:, 0], strict=True)
    )
    assert right / done.ids.size == pytest.approx(0.8, abs=0.06)
    assert right / (hints >= 0).sum() == pytest.approx(0.6, abs=0.05)


def test_a_file_that_is_no_trace_is_named(tmp_path: Path) -> None:
    for number, text in enumerate(["", "# n_layer=2\n", "phase,step\n0,0\n"]):
        path = tmp_path / f"{number}.csv"
        path.write_text(text)
        with pytest.raises(BadRouteTrace, match=path.name):
            read_route_csv(path)


ROUTE = """# n_layer=2 n_expert=4 n_expert_used=2 expert_bytes=10 dense_bytes=1
phase,step,layer,slot,expert
0,0,0,0,1
0,0,1,1,3
"""


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("1,0,-1,0,0", "layer -1 of 2"),
        ("1,0,2,0,0", "layer 2 of 2"),
        ("1,0,0,-2,0", "slot -2 of 2"),
        ("1,0,0,0,4", "expert 4 of 4"),
        ("2,0,0,0,0", "phase 2 of 2"),
        ("1,0,0,0,", "invalid literal"),
    ],
)
def test_a_row_that_cannot_be_is_refused(row: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text(ROUTE)
    assert read_route_csv(path).passes[0].ids[:, 0].tolist() == [[1, -1], [-1, 3]]
    path.write_text(ROUTE + row + "\n")
    with pytest.raises(BadRouteTrace, match=words):
        read_route_csv(path)


def test_a_route_trace_grows_no_further_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of some kilobytes may inflate to any size, and a line may need a large array."""
    path = tmp_path / "x.csv.gz"
    with gzip.open(path, "wb") as file:
        file.write(ROUTE.encode())
        for _ in range(64):
            file.write(b"\n" * (1 << 16))
    monkeypatch.setattr(route_csv, "_MOST_BYTES", 1 << 20)
    with pytest.raises(BadRouteTrace, match="more than 1 MiB of text"):
        read_route_csv(path)
    path = tmp_path / "y.csv"
    path.write_text(ROUTE.replace("n_layer=2", "n_layer=1024") + "1,0,0,0,0\n")
    monkeypatch.setattr(route_csv, "_MOST_IDS", 4000)
    with pytest.raises(BadRouteTrace, match="more than 4000 places"):
        read_route_csv(path)


# The study's targets (docs/study.md), on the real traces.


@cache
def trace(name: str) -> Recording:
    return read_route_csv(TRACES / f"{name}.route.csv.gz")


def replayed(
    name: str, policy: Callable[[Setup], Policy], share: float, hints: float = 0
) -> Outcome:
    recording = trace(name)
    shape = recording.shape
    gate = ModelledHints(hints, hints, shape.experts) if hints else None
    slots = round(share * shape.layers * shape.experts)
    eamc = Eamc(16, shape.layers, shape.experts)
    return Replay(recording, policy, Conditions(slots, hints=gate), eamc).run()


NAMES = ("qwen3-30b-a3b", "gemma-4-26b-a4b")


@pytest.mark.parametrize(("name", "lru", "belady"), [(NAMES[0], 0.5, 0.76), (NAMES[1], 0.49, 0.74)])
def test_calibration_at_a_tenth(name: str, lru: float, belady: float) -> None:
    """Compare with the hit rates in the README of the traces."""
    recording = trace(name)
    future = [(layer, p.ids[layer]) for p in recording.passes for layer in range(len(p.ids))]
    future = [(layer, ids) for layer, ids in future if (ids >= 0).any()]
    assert replayed(name, Lru, 0.1).hit_rate == pytest.approx(lru, abs=0.01)
    assert replayed(name, lambda s: Belady(s, future), 0.1).hit_rate == pytest.approx(
        belady, abs=0.01
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("share", [0.05, 0.1, 0.2, 0.35])
def test_adaptive_hits_and_stalls_like_the_best(name: str, share: float) -> None:
    lru, adaptive = (replayed(name, POLICIES[p], share) for p in ("lru", "adaptive"))
    for other in (lru, replayed(name, POLICIES["lfu"], share)):
        assert adaptive.hit_rate >= other.hit_rate - 0.005
    assert adaptive.stall_ms_per_token <= lru.stall_ms_per_token
    if share == 0.1:
        assert adaptive.insertions_per_token <= lru.insertions_per_token / 2


@pytest.mark.parametrize("name", NAMES)
def test_good_hints_take_a_third_of_the_stall(name: str) -> None:
    for share in (0.2, 0.35):
        lru = replayed(name, POLICIES["lru"], share)
        hinted = replayed(name, POLICIES["adaptive"], share, 0.9)
        assert hinted.stall_ms_per_token <= 0.7 * lru.stall_ms_per_token


@pytest.mark.parametrize("name", NAMES)
def test_poor_hints_do_no_harm(name: str) -> None:
    for share in (0.1, 0.35):
        plain = replayed(name, POLICIES["adaptive"], share)
        hinted = replayed(name, POLICIES["adaptive"], share, 0.5)
        assert hinted.stall_ms_per_token <= plain.stall_ms_per_token * 1.01
