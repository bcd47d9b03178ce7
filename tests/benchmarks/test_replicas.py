"""Test the simulated side of benchmarks/replicas.py, and its table."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from benchmarks.replicas import Item, orders, show, simulated
from moeinf.offload.routing.requests_file import RecordedRequest, RecordedRequests
from moeinf.offload.routing.trace import RoutingShape
from moeinf.offload.simulator.clock import TimeModel

LAYERS, EXPERTS, TOP_K, TOKENS = 2, 16, 2, 6


def kinds(count: int) -> tuple[list[Item], RecordedRequests]:
    """Return requests of two kinds, which have half of the experts each, and words of their own."""
    draw, items, found = np.random.default_rng(0), [], []
    for number in range(count):
        kind = number % 2
        own = np.stack([
            kind * EXPERTS // 2 + draw.permutation(EXPERTS // 2)[:TOP_K]
            for _ in range(TOKENS * LAYERS)
        ])  # fmt: skip
        ids = own.reshape(TOKENS, LAYERS, TOP_K).astype(np.uint16)
        words = " ".join(f"{'ab'[kind]}{n}" for n in draw.integers(6, size=8))
        items.append(Item("some", "ab"[kind], f"{number} {words}", 8))
        found.append(RecordedRequest("ab"[kind], 4, ids, None))
    return items, RecordedRequests("some", RoutingShape(LAYERS, EXPERTS, TOP_K), found)


def test_experts_find_their_replica() -> None:
    items, requests = kinds(96)
    about = argparse.Namespace(policy="lru", share="50%", replicas=2)
    sent = orders(len(items), 3, 1)
    rates = {
        router: simulated(requests, items, sent, router, about, TimeModel(), 1.0, 0)
        for router in ("random", "experts")
    }
    assert rates["random"] < 0.8
    assert rates["experts"] > rates["random"] + 0.1


def test_every_client_sends_its_share_in_each_round() -> None:
    found = orders(10, 3, 2)
    assert [len(mine) for mine in found] == [8, 6, 6]
    assert sorted(place for mine in found for place in mine) == sorted(2 * list(range(10)))


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    show({
        "random": {"simulated": [0.5, 0.52], "real": [0.49], "tokens_per_s": [9.0]},
        "experts": {"simulated": [0.56], "real": [0.54], "tokens_per_s": [8.0, 10.0, 11.0]},
    })  # fmt: skip
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["random", "51.00", "+0.00", "49.00", "+0.00", "9.0"]
    assert lines[2] == ["experts", "56.00", "+5.00", "54.00", "+5.00", "1.00", "10.0"]
