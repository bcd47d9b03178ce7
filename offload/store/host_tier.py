"""The tier of host memory: experts in RAM, the reads that bring them, the CPU's arithmetic.

Does not know families, or tiers above. A miss of a layer is *coming* from `bring` to `arrive`: its
slot is assigned and pinned. prefetch.py handles prefetches.
Only the engine's thread uses it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moeinf.native import SlotKernel, SlotPool
from moeinf.offload.format.layout import ExpertLayout
from moeinf.offload.policy.base import Policy, Prefetch
from moeinf.offload.routing.trace import Phase
from moeinf.offload.store.compute import SlotMath, TorchFfn, by_math
from moeinf.offload.store.prefetch import Cause, ReadAhead
from moeinf.offload.store.prefetch_gate import Judge
from moeinf.offload.store.residency import Residency
from moeinf.offload.store.resident_layers import NativeLayer, SlotKernels
from moeinf.offload.store.routed import Routed, cut
from moeinf.offload.store.stats import StoreStats
from moeinf.offload.store.tier import Experts, Opened
from moeinf.offload.store.transfer import PIECE_BYTES, ExpertReadError, Transfer

_FEW = 4  # reads of a long pass for which experts of later layers leave
_MOST_IN_A_CALL = 8  # experts of a long pass that are computed in one call


class HostTier:
    """The slots of one pool, filled by `transfer`."""

    def __init__(
        self,
        layouts: Sequence[ExpertLayout],
        experts: int,
        pool: SlotPool,
        transfer: Transfer,
        policy: Policy,
        math: TorchFfn,
        stats: StoreStats | None = None,
        slots: int | None = None,
    ) -> None:
        """Set up the tier.

        layouts: of every expert, in the order of cells, each within a slot of the pool.
        experts: number of one layer. slots: of the pool, those in use; None: all of them.
        """
        self.experts, self.layouts, self._pool = experts, tuple(layouts), pool
        self.table = Residency(slots or pool.slots, len(layouts), pool.slots)
        self.policy = policy
        self.stats, self.decoding = stats or StoreStats(), False
        self.pieces: Sequence[slice] = ()  # of a long pass, see begin_long
        self._transfer, self.call_bytes_per_s = transfer, transfer.call_bytes_per_s
        distinct = {layout: SlotMath(layout, pool, math) for layout in dict.fromkeys(layouts)}
        self._math = [distinct[layout] for layout in layouts]  # by cell
        self._layers = SlotKernels(self._math, self.table, experts)
        self.judge = Judge(len(layouts) // experts, experts)
        self._ahead = ReadAhead(self.table, transfer, policy, self.stats, self.judge)
        self._pieces = max(1.0, max(layout.slot_bytes for layout in layouts) / PIECE_BYTES)
        self.coming: dict[int, int] = {}  # cell → ticket a layer waits for; first asked first

    @property
    def slots(self) -> int:
        return self.table.slots

    @property
    def count(self) -> int:
        """Experts that are in memory now."""
        return self.table.count

    @property
    def all_fit(self) -> bool:
        """True if all experts fit, so that none ever has to leave."""
        return self.table.all_fit

    @property
    def most_in_a_call(self) -> int | None:
        """Experts that one call computes; None: all that are ready.

        A long pass has many rows for each, and reads the next layer's into the slots that it frees.
        """
        return _MOST_IN_A_CALL if self.pieces else None

    @property
    def idle(self) -> bool:
        """True if nothing is pinned, which holds between passes, however the last one ended."""
        return self.table.pinned() == 0

    @property
    def direct_io(self) -> bool:
        """True if every read has bypassed the page cache."""
        return self._transfer.direct_io

    def resident(self, cells: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        return self.table.resident(cells)

    def preferred(self, layer: int) -> NDArray[np.bool_] | None:
        """Return which experts [E] of a layer are here, if the pass decodes and some are absent.

        A lossy choice prefers them; see models/layers/cache_aware.py.
        """
        if not self.decoding or self.all_fit:
            return None
        self.settle()
        return self.resident(layer * self.experts + np.arange(self.experts))

    def begin_pass(self, rows: NDArray[np.int64], phase: Phase) -> None:
        self.decoding = self._ahead.decoding = phase == "decode"
        self.pieces, self.table.leaving = (), self.table.cells
        if self.all_fit:
            self.settle()  # so that layers whose experts have all arrived are native calls
        begin = self.clock()
        self.judge.begin_pass()
        self.policy.begin_pass(rows, phase)
        self.decided(begin)

    def begin_long(self, pieces: Sequence[slice]) -> None:
        """Make the open pass a long one: each layer computes several pieces of rows at once.

        It uses nearly all experts, layer by layer. So experts of later layers do not leave for
        those of earlier ones, and each expert is read once at most.
        """
        self.pieces = pieces

    def end_pass(self, accepted: NDArray[np.bool_] | None) -> None:
        self.pieces, self.table.leaving = (), self.table.cells
        begin = self.clock()
        self.policy.end_pass(accepted)
        self.decided(begin)

    def open(
        self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, hint: tuple[int, Tensor] | None
    ) -> Opened:
        """Open a layer that the CPU computes alone. Raises ValueError for invalid ids."""
        if self.pieces:
            self.table.leaving = (layer + 1) * self.experts
        mix = weights.numpy() if self.policy.wants_weights else None
        routed = Routed.of(layer, ids.numpy(), self.experts, mix)
        told = None if hint is None else (hint[0], hint[1].numpy())
        return routed, told, CpuWork(self, layer, x, weights, routed.places)

    def native_layer(
        self, layer: int, x: Tensor, ids: Tensor, weights: Tensor
    ) -> NativeLayer | None:
        """Open a layer of few rows whose experts are all resident; None: call `open` instead."""
        if self.slots_of(layer) is None:
            return None
        found = self._layers.routed(layer, x, ids, weights)
        if found is not None:
            self.computed(layer, ids, weights, found.events)
        return found

    def slots_of(self, layer: int) -> SlotKernel | None:
        """Return the kernel for a layer of few rows whose experts are all resident.

        None: it has to be opened.
        """
        if self.pieces or self._ahead.waits_for_use:
            return None
        return self._layers.kernel(layer)

    def computed(self, layer: int, ids: Tensor, weights: Tensor, events: int) -> None:
        """Count a layer whose experts (`events` ids) were all resident; report it to the policy."""
        begin = self.clock()
        if not self.all_fit:  # else no cell ever has to leave
            mix = weights.numpy() if self.policy.wants_weights else None
            self.policy.routed(layer, ids.numpy(), mix)
        self.stats.used(self.decoding, events, events)
        self.decided(begin)

    @property
    def warming(self) -> bool:
        """True while reads of the warm start are on their way, as of the last `settle`."""
        return self._ahead.warming

    def warm(self, cells: Iterable[int], cause: Cause | None) -> int:
        """Read these into empty slots, in order, at the lowest priority; return how many fit."""
        return self._ahead.warm(cells, cause)

    def settle(self) -> None:
        """Make arrived prefetches resident. Called between layers."""
        self._ahead.settle()

    def resize(self, slots: int) -> None:
        """Use this number of slots from now on, between passes; return memory to the system.

        Experts leave if there are fewer. Raises ExpertReadError where hung reads hold the slots.
        """
        table = self.table
        assert self.idle, "an expert is in use"
        while table.slots < min(slots, table.most):
            table.grant()
        while table.slots > slots:
            self.settle()
            table.regain(self._transfer.may_write)
            if not (table.free or self._ahead.give_way() or self.evict() is not None):
                self.wait_for_slot(0)
                continue
            self._transfer.release(table.withhold())
        self.policy.resize(table.slots)

    def use(self, policy: Policy) -> None:
        """Replace the policy, between passes."""
        self.policy = policy
        self._ahead.use(policy)
        for cell in self.table.present():
            policy.admitted(cell)

    def measure_from_here(self) -> None:
        """Report to the judge that decoding starts."""
        self.judge.starts(self._transfer.calls())

    def measure(self, computing: float) -> None:
        """Report to the judge a decode pass: its seconds without waits."""
        self.judge.measured(computing, self._transfer.calls(), self._pieces)

    def worth(self, prefetches: Sequence[Prefetch], layer: int) -> list[Prefetch]:
        """Return those that are worth their time, once `layer` has been routed."""
        return self.judge.worth(prefetches, layer, self._ahead.begun)

    def prefetch(self, prefetches: Sequence[Prefetch]) -> None:
        """Prefetch the absent ones of these; they replace the earlier prefetches."""
        self._ahead.prefetch(prefetches)

    def bring(self, cells: Iterable[int], busy: Collection[int] = ()) -> list[int]:
        """Give pinned slots to the first of these, queue their reads, and return which.

        A prefetch in flight becomes demand. It stops at the first that can have no
        slot.
        """
        table, take, coming = self.table, self._ahead.take, self.coming
        brought, absent, slots = list[int](), list[int](), list[int]()
        table.regain(self._transfer.may_write)
        for cell in cells:
            ticket = take(cell)
            if ticket is None:
                if not (table.free or self._ahead.give_way() or self.evict(busy) is not None):
                    break
                slots.append(table.assign(cell))
                absent.append(cell)
                self.judge.missed(cell)
                ticket = 0
            coming[cell] = ticket
            brought.append(cell)
            self.policy.admitted(cell)
        if absent:
            try:
                coming.update(zip(absent, self._transfer.demand(absent, slots), strict=True))
            except BaseException:
                for cell in absent:
                    del coming[cell]
                self.forget(absent)
                raise
        return brought

    def arrive(self) -> int:
        """Wait for the cell that was requested first and return it, resident and pinned.

        Raises ExpertReadError, after which the cell has no slot.
        """
        cell, ticket = next(iter(self.coming.items()))
        start = time.perf_counter()
        try:
            self._transfer.wait(ticket, cell)
        except ExpertReadError:
            del self.coming[cell]
            self.forget([cell])
            raise
        waited, size, stats = time.perf_counter() - start, self._transfer.bytes_of(cell), self.stats
        del self.coming[cell]
        self.table.loaded(cell)
        stats.loads += 1
        stats.bytes_read += size
        stats.stall_seconds += waited
        if self.decoding:
            stats.decode_loads += 1
            stats.decode_bytes_read += size
            stats.decode_stall_seconds += waited
        return cell

    def wait_for_slot(self, cell: int) -> None:
        """Wait for a prefetch to end, and free its slot.

        Raises ExpertReadError for `cell`, which needs a slot, where no prefetch is in flight.
        """
        if not self._ahead.wait_for_one():
            raise self._transfer.no_slot(cell)

    def evict(self, busy: Collection[int] = ()) -> int | None:
        victim = self.policy.victim(self.table.idle(busy))
        if victim is None and busy:
            victim = self.policy.victim(self.table.can_evict)
        table = self.table
        if victim is None and table.leaving < table.cells and len(self.coming) < _FEW:
            bound, table.leaving = table.leaving, table.cells
            victim = self.policy.victim(table.can_evict)
            table.leaving = bound
        if victim is not None:
            self._ahead.evict(victim)
        return victim

    def forget(self, cells: Iterable[int]) -> None:
        """Free the slots of cells whose reads have failed or are given up."""
        gone = list(cells)
        self.policy.forget(gone)  # an arrival was reported to it
        for cell in gone:
            self.table.give_up(cell, self._transfer.may_write)

    def abandon(self) -> None:
        """Cancel the coming reads, and free their slots after the reads have ended."""
        while self.coming:  # each leaves the book before anything can interrupt the next
            cell = next(iter(self.coming))
            ticket = self.coming.pop(cell)
            try:
                self._transfer.abandon(ticket)
            finally:  # a second Ctrl-C may cut off its wait
                self.forget([cell])

    def compute(self, x: Tensor, experts: Experts, top_k: int, rows: Tensor) -> None:
        """Fill the rows of resident cells of one layer, on the CPU."""
        slot_of = self.table.slot_of
        for math, alike in by_math(experts, self._math):
            math.run(x, [(slot_of(cell), places) for cell, places in alike], top_k, rows)

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        return self._math[0].combine(rows, weights)

    def math_of(self, cell: int) -> SlotMath:
        """Return the arithmetic of an expert's layout."""
        return self._math[cell]

    def used(self, routed: Routed, hits: Iterable[int], events: int) -> None:
        """Count a layer's routing: `hits` were resident, which are `events` of it."""
        self.stats.used(self.decoding, routed.events, events)
        if not self._ahead.waits_for_use:
            return
        for cell in hits:
            cause = self._ahead.used(cell)
            if cause is not None and self.decoding:
                self.stats.hit_ahead(cause, len(routed.places[cell]))

    def clock(self) -> float:
        """Return seconds; it stops during calls to the queue, whose readers may take the core."""
        return time.perf_counter() - self._transfer.telling_seconds

    def decided(self, begin: float) -> None:
        """Count the time since `begin` of the clock as spent on deciding residency."""
        if self.decoding:
            self.stats.decode_policy_seconds += self.clock() - begin

    def close(self, locked: bool = False) -> None:
        """End the readers, and free the slots; `locked`: with their last reference."""
        self._transfer.close()
        if not locked:
            self._pool.release_all()


class CpuWork:
    """The rows of one layer on the CPU."""

    __slots__ = ("_ends", "_host", "_math", "_mix", "_places", "_rows", "_x")

    def __init__(
        self, host: HostTier, layer: int, x: Tensor, weights: Tensor, places: dict[int, list[int]]
    ) -> None:
        """Set up x [T, D], weights [T, K], places t·K + k by cell."""
        self._host, self._math = host, host.math_of(layer * host.experts)
        self._x, self._mix, self._places = x, weights, places
        self._ends = [r.stop * weights.shape[1] for r in host.pieces[:-1]]
        if not self._math.rows_interact:
            self._ends = []
        self._rows: Tensor | None = None  # [T·K, D]

    def compute(self, cells: Iterable[int]) -> None:
        places, ends = self._places, self._ends
        experts = [(cell, at) for cell in cells for at in cut(places[cell], ends)]
        self._host.compute(self._x, experts, self._mix.shape[1], self._filled())

    def compute_in(self, math: SlotMath, cells: Sequence[tuple[int, int]]) -> int:
        """Compute (cell, slot) of other slots, those of `math`; return how many places."""
        experts = [(slot, self._places[cell]) for cell, slot in cells]
        math.run(self._x, experts, self._mix.shape[1], self._filled())
        return sum(len(places) for _, places in experts)

    def _filled(self) -> Tensor:
        """Return the rows [T·K, D]; those without an expert stay 0 and add nothing."""
        if self._rows is None:
            self._rows = self._x.new_zeros(self._mix.numel(), self._x.shape[1])
        return self._rows

    def result(self) -> Tensor:
        """Return [T, D]."""
        return self._math.combine(self._filled().view(*self._mix.shape, -1), self._mix)
