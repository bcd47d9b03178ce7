"""Reads ahead that have yielded to demand: dropped when no longer wished for, used otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from moeinf.offload.policy.base import Prefetch, Setup
from moeinf.offload.policy.lru import Lru
from moeinf.offload.routing.trace import RoutingShape
from moeinf.offload.store.prefetch import ReadAhead
from moeinf.offload.store.prefetch_gate import Judge, Times
from moeinf.offload.store.residency import Residency
from moeinf.offload.store.stats import StoreStats
from tests.fakes import AtOnce

SHAPE = RoutingShape(layers=2, experts=4, top_k=1)


class Yielding(AtOnce):
    """A `Transfer` whose reads ahead have all yielded after their first piece."""

    def __init__(self) -> None:
        super().__init__()
        self.cancelled: list[int] = []
        self.hastened: list[int] = []

    def ahead(self, cells: Sequence[int], slots: Sequence[int], priority: float) -> list[int]:
        return self.demand(cells, slots)

    def hasten(self, ticket: int) -> None:
        self.hastened.append(ticket)

    def cancel(self, ticket: int, half_read: bool = False) -> bool:
        self.cancelled += [ticket] * half_read
        return half_read


@pytest.fixture
def transfer() -> Yielding:
    return Yielding()


@pytest.fixture
def residency() -> Residency:
    return Residency(3, 8)


@pytest.fixture
def judge() -> Judge:
    return Judge(2, 4)


@pytest.fixture
def ahead(transfer: Yielding, residency: Residency, judge: Judge) -> ReadAhead:
    policy = Lru(Setup(SHAPE, 3))
    return ReadAhead(residency, transfer, policy, StoreStats(), judge)  # type: ignore[arg-type]


def test_a_half_read_expert_stays_while_it_is_wished_for(
    ahead: ReadAhead, residency: Residency, transfer: Yielding
) -> None:
    ahead.prefetch([Prefetch(4, True), Prefetch(5, True)])
    ahead.settle()
    assert 4 in ahead.begun
    ahead.prefetch([Prefetch(5, True), Prefetch(6, True)])
    assert transfer.cancelled == [1]
    assert [residency.has_slot(cell) for cell in (4, 5, 6)] == [False, True, True]
    assert residency.free == 1


def test_its_layer_makes_it_demand(
    ahead: ReadAhead, residency: Residency, transfer: Yielding
) -> None:
    ahead.prefetch([Prefetch(4, True)])
    ahead.settle()
    assert ahead.take(4) == 1
    assert (transfer.hastened, transfer.cancelled) == ([1], [])
    ahead.prefetch([])  # it is no read ahead any more
    assert residency.has_slot(4)


def test_a_dropped_read_counts_as_a_wrong_claim(ahead: ReadAhead, judge: Judge) -> None:
    before, judge.times = judge._came.value, Times(read=10.0, piece=2.0, layer=20.0)
    ahead.prefetch(judge.worth([Prefetch(4, True)], 0))
    ahead.settle()
    ahead.prefetch([])
    assert judge._came.value < before
    assert judge.saved == -(2.0 / 20 * 5 + 0.1 * 10)  # the delay of demand, the regret


def test_the_warm_start_is_not_dropped(ahead: ReadAhead, residency: Residency) -> None:
    assert ahead.warm([4, 5], "predicted") == 2
    ahead.settle()
    ahead.prefetch([])
    assert residency.has_slot(4)
    assert residency.has_slot(5)


def test_a_queued_read_of_the_warm_start_is_asked_for_again(
    ahead: ReadAhead, residency: Residency, transfer: Yielding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a layer's reads come in the order in which it waits for them."""
    ahead.warm([4, 5], None)
    monkeypatch.setattr(transfer, "cancel", lambda _ticket: True)
    assert ahead.take(4) is None
    assert not residency.has_slot(4)
    monkeypatch.undo()  # the other one has begun
    assert ahead.take(5) == 2
    assert transfer.hastened == [2]
