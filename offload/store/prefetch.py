"""Prefetches of one store: reads in flight, the victims they displaced, and their use.

Does not know layers, rows, arithmetic, or the reasons of a policy.

    queued ──▶ in flight ──arrived──▶ resident and admitted; unused until a layer requests it
                ├──its layer requests it──▶ becomes demand: the same read, waited for
                ├──still queued at the next layer──▶ cancelled: its victim is back, whose bytes
                │                                    nothing has overwritten
                ├──half read, and no longer wanted──▶ cancelled, its slot is free
                └──failed──▶ its slot is free; if a layer requests it, it is read again

The prefetches of a layer replace those of the layer before, as in the simulator. Only a read that
has begun can cost another expert its slot. prefetch_gate.py is told the outcome of each. The first
prefetches, the *warm start*, fill empty slots only. They wait at a lower priority than any other,
survive layers, and are cancelled when a slot is needed or their own layer asks first. Those that
nothing predicts have no cause, and their use is not counted: a layer is one native call only while
no use has to be counted.
Only the engine's thread uses it.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.policy.base import Policy, Prefetch
from moeinf.offload.store.prefetch_gate import Judge
from moeinf.offload.store.residency import Residency
from moeinf.offload.store.stats import StoreStats
from moeinf.offload.store.transfer import Transfer

Cause = Literal["hinted", "predicted"]

_ROWS_PER_SIGN = 64  # a long pass prefetches what is predicted for one in so many of its rows
_PREFETCH, _WARM = 0.0, -1.0  # priorities; demand is above, equals are read in the order of asking


@dataclass(slots=True)
class _Flight:
    """A read that no layer has requested yet."""

    ticket: int  # 0: the bytes were there
    cause: Cause | None  # None: nothing predicted it
    warm: bool
    victim: int | None = None  # the cell evicted for it
    victim_cause: Cause | None = None  # if the victim was itself prefetched, and never used


class ReadAhead:
    """All prefetches of one store. `decoding`: whether bytes count for decoding."""

    def __init__(
        self,
        residency: Residency,
        transfer: Transfer,
        policy: Policy,
        stats: StoreStats,
        judge: Judge,
    ) -> None:
        self._residency, self._transfer, self._policy = residency, transfer, policy
        self._stats, self._judge = stats, judge
        self._flying: dict[int, _Flight] = {}  # by cell, in the order of asking
        self._cells: dict[int, int] = {}  # by ticket, of those in flight
        self._new: list[int] = []  # cells that no settle has seen: they may not have begun
        self._unused: dict[int, Cause] = {}  # arrived, neither used nor evicted yet
        self._warm = 0  # reads of the warm start in flight
        self.decoding = False

    def use(self, policy: Policy) -> None:
        self._policy = policy

    def settle(self) -> None:
        """Make arrived reads resident, and cancel the prefetches that have not begun."""
        if not self._flying:
            return
        for ticket, failure in self._transfer.ended():
            cell = self._cells.get(ticket)
            if cell is not None:
                self._settle(cell, failed=failure is not None)
        new, self._new = self._new, []
        for cell in new:
            flight = self._flying.get(cell)
            if flight is None:
                continue
            if not flight.ticket:
                self._settle(cell)
            elif not flight.warm and self._transfer.cancel(flight.ticket):
                self._return(cell, self._land(cell))

    def _settle(self, cell: int, failed: bool = False) -> None:
        flight = self._land(cell)
        if failed:
            self._residency.give_up(cell, self._transfer.may_write)
            return
        self._residency.loaded(cell)
        self._account(cell, flight)
        if flight.cause is not None:
            self._unused[cell] = flight.cause
        self._policy.admitted(cell)

    def _land(self, cell: int) -> _Flight:
        flight = self._flying.pop(cell)
        self._cells.pop(flight.ticket, None)
        self._warm -= flight.warm
        return flight

    def take(self, cell: int) -> int | None:
        """Return the ticket of a cell in flight that a layer requests; it is pinned demand then.

        None: it is not in flight, or has not begun and is cancelled: a layer's reads are to come in
        the order in which it waits for them.
        """
        if cell not in self._flying:
            return None
        flight = self._land(cell)
        if flight.warm and self._transfer.cancel(flight.ticket):
            self._residency.release(cell)
            return None
        self._residency.pin(cell)
        self._judge.judged(cell, used=True)
        self._transfer.hasten(flight.ticket)
        if flight.cause is not None:
            self._stats.ahead_bytes_used += self._transfer.bytes_of(cell)
            self._stats.ahead_bytes_read += self._transfer.bytes_of(cell)
        return flight.ticket

    @property
    def warming(self) -> bool:
        """True while reads of the warm start are in flight, as of the last `settle`."""
        return self._warm > 0

    @property
    def begun(self) -> Container[int]:
        """Return the cells in flight; after `settle` their reads have begun."""
        return self._flying

    @property
    def waits_for_use(self) -> bool:
        """True if an expert has arrived that no layer has requested yet."""
        return bool(self._unused)

    def used(self, cell: int) -> Cause | None:
        """Count a hit of the cell; return why it was prefetched, if this is its first use."""
        cause = self._unused.pop(cell, None)
        if cause is not None:
            self._judge.judged(cell, used=True)
            self._stats.ahead_bytes_used += self._transfer.bytes_of(cell)
        return cause

    def evict(self, victim: int) -> Cause | None:
        """Free the slot of an unpinned cell that the policy gives up."""
        cause = self._unused.pop(victim, None)
        if cause is not None:
            self._judge.judged(victim, used=False)
            self._stats.ahead_bytes_wasted += self._transfer.bytes_of(victim)
        self._residency.evict(victim)
        return cause

    def prefetch(self, prefetches: Sequence[Prefetch]) -> None:
        """Ask for absent cells, the most urgent first, until no cell may leave for the next."""
        self._drop_all_but({prefetch.cell for prefetch in prefetches})
        flights: dict[int, _Flight] = {}
        for cell, urgent, _ in prefetches:
            if self._residency.has_slot(cell):
                continue
            flight = _Flight(0, "hinted" if urgent else "predicted", warm=False)
            if not self._residency.free:
                flight.victim = self._policy.victim(self._residency.can_evict)
                if flight.victim is None:
                    break
                flight.victim_cause = self.evict(flight.victim)
                self._judge.displaced(flight.victim)
            self._residency.assign(cell, pinned=False)
            flights[cell] = flight
        self._launch(flights, _PREFETCH)

    def warm(self, cells: Iterable[int], cause: Cause | None) -> int:
        """Fill empty slots with these, in this order, at the lowest priority; return how many."""
        flights: dict[int, _Flight] = {}
        for cell in cells:
            if not self._residency.free:
                break
            if not self._residency.has_slot(cell):
                self._residency.assign(cell, pinned=False)
                flights[cell] = _Flight(0, cause, warm=True)
        self._launch(flights, _WARM)
        self._warm += len(flights)
        return len(flights)

    def give_way(self) -> bool:
        """Cancel the queued read of the lowest rank and free its slot. False: no read is queued."""
        for cell in reversed(self._flying):
            if self._transfer.cancel(self._flying[cell].ticket):
                self._return(cell, self._land(cell))
                return self._residency.free > 0
        return False

    def wait_for_one(self) -> bool:
        """Wait for a read that holds a slot to end, and free the slot. False: none in flight."""
        if not self._flying:
            return False
        cell = next(iter(self._flying))
        try:
            self._transfer.abandon(self._land(cell).ticket)
        finally:
            self._residency.give_up(cell, self._transfer.may_write)
        return True

    def _drop_all_but(self, cells: Collection[int]) -> None:
        """Cancel half-read prefetches for other cells: the drive is there for better ones."""
        for cell, flight in list(self._flying.items()):
            if flight.warm or cell in cells:
                continue
            if self._transfer.cancel(flight.ticket, half_read=True):
                self._land(cell)
                self._judge.judged(cell, used=False)
                self._residency.give_up(cell, self._transfer.may_write)

    def _launch(self, flights: dict[int, _Flight], priority: float) -> None:
        if not flights:
            return
        slots = [self._residency.slot_of(cell) for cell in flights]
        tickets = self._transfer.ahead(list(flights), slots, priority)
        for flight, ticket in zip(flights.values(), tickets, strict=True):
            flight.ticket = ticket
        self._flying.update(flights)
        self._cells.update((flight.ticket, cell) for cell, flight in flights.items())
        self._new += flights

    def _return(self, cell: int, flight: _Flight) -> None:
        """Undo a read that never began: the slot belongs to its victim again."""
        slot = self._residency.release(cell)
        victim = flight.victim
        if victim is None or self._residency.has_slot(victim):
            return
        self._residency.restore(victim, slot)
        self._policy.admitted(victim)
        self._judge.restored(victim)
        if flight.victim_cause is not None:
            self._unused[victim] = flight.victim_cause
            self._stats.ahead_bytes_wasted -= self._transfer.bytes_of(victim)

    def _account(self, cell: int, flight: _Flight) -> None:
        stats, size = self._stats, self._transfer.bytes_of(cell)
        stats.loads += 1
        stats.bytes_read += size
        if flight.cause is not None:
            stats.ahead_bytes_read += size
        if self.decoding and not flight.warm:
            stats.decode_loads += 1
            stats.decode_bytes_read += size


def expected(layer: int, ids: NDArray[np.integer[Any]], experts: int) -> list[Prefetch]:
    """Return the experts that ids [T, H] predict for a layer of a long pass, the surest first."""
    counts = np.bincount(ids[ids >= 0], minlength=experts)
    order = np.argsort(-counts, kind="stable")
    sure = order[counts[order] * _ROWS_PER_SIGN >= len(ids)]
    return [Prefetch(layer * experts + expert, True) for expert in sure.tolist()]
