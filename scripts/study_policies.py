"""Policies that the study compares with, and parts of `adaptive` removed one by one.

None of these is offered to users: docs/study.md gives the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.policy.adaptive import Adaptive, AdaptiveKnobs
from moeinf.offload.policy.base import (
    Evictable,
    Passive,
    Policy,
    Setup,
    Weights,
    Wish,
    chosen_cells,
    lowest,
)
from moeinf.offload.policy.belady import Belady
from moeinf.offload.policy.lru import Lru
from moeinf.offload.policy.table import POLICIES
from moeinf.offload.routing.eamc import Eamc
from moeinf.offload.routing.hint_model import HintSource
from moeinf.offload.routing.trace import Phase, Recording
from moeinf.offload.simulator.clock import TimeModel
from moeinf.offload.simulator.outcome import Outcome
from moeinf.offload.simulator.replay import Conditions, Replay

_DECAY = 0.95  # per token
_MOST = 1 << 20  # more than all entries, and an unreachable probability


class Decayed(Passive):
    """Evict the resident cell with the smallest decayed count of uses."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._counts = np.zeros(setup.cells)
        self._resident = np.zeros(setup.cells, np.bool_)

    def begin_pass(self, rows: NDArray[np.int64], phase: Phase) -> None:
        self._counts *= _DECAY

    def routed(
        self, layer: int, ids: NDArray[np.integer[Any]], weights: Weights | None = None
    ) -> None:
        self._counts[chosen_cells(layer, ids, self.setup.shape.experts)] += 1

    def admitted(self, cell: int) -> None:
        self.insertions += 1
        self._resident[cell] = True

    def victim(self, evictable: Evictable) -> int | None:
        cell = lowest(np.where(self._resident, self._counts, np.inf), evictable)
        if cell is not None:
            self._resident[cell] = False
        return cell

    def forget(self, cells: Iterable[int]) -> None:
        self._resident[list(cells)] = False


class Gate(Lru):
    """LRU that prefetches what the next layer's gate names, without other predictions."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._named: list[int] = []

    def routed(
        self, layer: int, ids: NDArray[np.integer[Any]], weights: Weights | None = None
    ) -> None:
        super().routed(layer, ids, weights)
        self._named = []

    def hinted(self, layer: int, ids: NDArray[np.integer[Any]]) -> None:
        self._named = chosen_cells(layer, ids, self.setup.shape.experts)

    def prefetch(self, most: int) -> Sequence[Wish]:
        return [Wish(cell, True) for cell in self._named if cell not in self._resident][:most]


class LruVictims:
    """`adaptive`, with LRU's victims."""

    def __init__(self, setup: Setup) -> None:
        self._adaptive, self._lru = Adaptive(setup), Lru(setup)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adaptive, name)

    def routed(
        self, layer: int, ids: NDArray[np.integer[Any]], weights: Weights | None = None
    ) -> None:
        self._adaptive.routed(layer, ids, weights)
        self._lru.routed(layer, ids, weights)

    def admitted(self, cell: int) -> None:
        self._adaptive.admitted(cell)
        self._lru.admitted(cell)

    def victim(self, evictable: Evictable) -> int | None:
        leaves = self._lru.victim(evictable)
        if leaves is not None:
            self._adaptive.forget([leaves])
        return leaves

    def forget(self, cells: Iterable[int]) -> None:
        gone = list(cells)
        self._adaptive.forget(gone)
        self._lru.forget(gone)


@dataclass(frozen=True)
class Way:
    """One row of a comparison: a policy, and whether it is given hints and finished requests."""

    name: str
    make: Callable[[Setup], Policy]
    hints: bool = False
    collect: bool = True


def knobs(**changed: Any) -> Callable[[Setup], Policy]:
    """Return `adaptive` with other knobs."""
    return lambda setup: Adaptive(setup, AdaptiveKnobs(**changed))


COMPARED = (
    Way("lru", POLICIES["lru"]),
    Way("lfu", POLICIES["lfu"]),
    Way("decayed counts", Decayed),
    Way("lru and next-layer gate", Gate, hints=True),
    Way("eamc", POLICIES["eamc"]),
    Way("adaptive", POLICIES["adaptive"]),
    Way("adaptive with hints", POLICIES["adaptive"], hints=True),
)
ABLATED = (
    Way("everything", POLICIES["adaptive"], hints=True),
    Way("no hints", POLICIES["adaptive"]),
    Way("no trace: an EAMC that stays empty", POLICIES["adaptive"], hints=True, collect=False),
    Way("no match: the mean of all entries", knobs(matches=_MOST), hints=True),
    Way("no prefetch", knobs(sure=_MOST, worth=_MOST), hints=True),
    Way("no eviction of its own: LRU's victims", LruVictims, hints=True),  # type: ignore[arg-type]
    Way("no admission: whatever comes, stays", knobs(hysteresis=-1.0), hints=True),
    Way("no mixture of decays: 0.95 alone", knobs(decays=(0.95,)), hints=True),
    Way("the EAMC alone", POLICIES["eamc"]),
    Way("decayed counts alone", Decayed),
)


@dataclass
class Case:
    """A recording at one share of experts; `hints` are for ways with hints."""

    recording: Recording
    share: float
    hints: HintSource | None = None
    time: TimeModel = field(default_factory=TimeModel)

    def run(self, way: Way, capacity: int | None = None) -> Outcome:
        """Replay with an EAMC that begins empty."""
        shape = self.recording.shape
        size = shape.layers, shape.experts
        eamc = Eamc.automatic(*size) if capacity is None else Eamc(capacity, *size)
        conditions = Conditions(
            max(1, round(self.share * shape.layers * shape.experts)),
            self.time,
            self.hints if way.hints else None,
            collect=way.collect,
        )
        return Replay(self.recording, way.make, conditions, eamc).run()

    def best(self) -> Outcome:
        """Replay Belady, which is given the future routing."""
        events = [
            (layer, ids)
            for done in self.recording.passes
            for layer, ids in enumerate(done.ids)
            if (ids >= 0).any()
        ]
        return self.run(Way("belady", lambda setup: Belady(setup, iter(events))))
