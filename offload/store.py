"""The expert store: runs the routed experts of every layer from a cache smaller than the model.

Does not know families, text or requests. It satisfies the `Experts` protocol of models/base.py
without importing it. Which experts are resident never changes a result: each selected expert fills
its own rows, and the K rows of a token are combined in a fixed order.

One layer, as time runs:

    submit    pin the hits, give slots to misses and ask for their bytes
    (model)   computes its shared experts meanwhile
    result    compute the hits, then each miss as it arrives; every finished expert is unpinned, so
              that its slot can serve a miss that had none: a layer with more distinct experts than
              there are slots runs through them, and cannot deadlock as long as there is one slot

A miss is read into a staging slot and used there; finished with, it takes over the cache place of
whom the policy names (residency.py draws it).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Literal, Protocol

from torch import Tensor

from moeinf.native import SlotPool
from moeinf.offload.layout import ExpertLayout
from moeinf.offload.policy import Policy
from moeinf.offload.residency import Residency
from moeinf.offload.slot_math import SlotMath
from moeinf.offload.stats import StoreStats
from moeinf.offload.transfer import ExpertReadError, Transfer


class Stopped(Exception):
    """Somebody asked for an end while a pass was running; the pass has left nothing behind."""


class ExpertMath(Protocol):
    """The arithmetic, which is the models' business: how rows are grouped, computed, combined."""

    def group(self, ids: Tensor, experts: int) -> list[tuple[int, Tensor]]:
        """ids [T, K] -> per distinct expert, ascending: its number and its places t·K + k."""
        ...

    def ffn(self, x: Tensor, *weights: Tensor) -> Tensor:
        """One expert, its tensors as they lie, on its rows: [t, D] -> [t, D]."""
        ...

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """rows [T, K, D] and weights [T, K] -> [T, D], in a fixed order over K."""
        ...


class ExpertStore:
    """L layers of E experts behind `slots` slots of memory."""

    wants_hints = False

    def __init__(
        self,
        layout: ExpertLayout,
        experts: int,
        pool: SlotPool,
        residency: Residency,
        transfer: Transfer,
        policy: Policy,
        math: ExpertMath,
    ) -> None:
        self._experts = experts
        self._residency = residency
        self._transfer = transfer
        self._policy = policy
        self._math = math
        self._slots = SlotMath(layout, pool, math)
        self._open: _LayerRun | None = None
        self._decoding = False
        self.stats = StoreStats()
        self.stopped: Callable[[], bool] = lambda: False  # asked once per layer

    @property
    def resident(self) -> int:
        """Experts in memory now."""
        return self._residency.resident

    @property
    def idle(self) -> bool:
        """Whether nothing is pinned: true between passes, however the last one ended."""
        return self._residency.pinned() == 0

    def begin_pass(self, rows: Tensor, phase: Literal["encode", "prefill", "decode"]) -> None:
        self._abandon()
        self._decoding = phase == "decode"
        self._policy.begin_pass(rows.numpy(), phase)

    def hint(self, layer: int, ids: Tensor, scores: Tensor) -> None:
        """Nothing is read ahead yet."""

    def end_pass(self, accepted_rows: Tensor | None = None) -> None:
        self._abandon()
        self._policy.end_pass(None if accepted_rows is None else accepted_rows.numpy())

    def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> _LayerRun:
        """Raises Stopped when asked to end, ExpertReadError when a shard cannot be read."""
        if self.stopped():
            self._abandon()
            raise Stopped
        groups = {
            layer * self._experts + expert: places
            for expert, places in self._math.group(ids, self._experts)
        }
        hits = [cell for cell in groups if self._residency.is_resident(cell)]
        misses = deque(cell for cell in groups if not self._residency.is_resident(cell))
        self._count(groups, hits)
        self._policy.routed(layer, ids.numpy())
        for cell in hits:
            self._residency.pin(cell)
        self._open = _LayerRun(self, x, weights, groups, hits, misses)
        self._open.ask()
        return self._open

    def close(self) -> None:
        """Ends the readers; the slots must not be used afterwards."""
        self._abandon()
        self._transfer.close()

    def _abandon(self) -> None:
        if self._open is not None:
            self._open.abandon()

    def _count(self, groups: dict[int, Tensor], hits: list[int]) -> None:
        events = sum(len(places) for places in groups.values())
        hit_events = sum(len(groups[cell]) for cell in hits)
        if self._decoding:
            self.stats.decode_events += events
            self.stats.decode_hits += hit_events
        else:
            self.stats.prefill_events += events
            self.stats.prefill_hits += hit_events

    def _finish(self, cell: int) -> None:
        """Unpins; what was in a staging slot takes a cache place, if anybody can leave one."""
        residency = self._residency
        residency.unpin(cell)
        if not residency.is_staged(cell):
            return
        if residency.can_admit():
            residency.admit(cell)
        else:
            victim = self._policy.victim(residency.can_evict)
            if victim is None:
                residency.dismiss(cell)
                return
            residency.take_over(cell, victim)
        self._policy.admitted(cell)

    def _give_up(self, cell: int) -> None:
        """The read into the cell's slot has ended badly, or is given up."""
        if self._transfer.may_write(self._residency.slot_of(cell)):
            self._residency.lose(cell)
        else:
            self._residency.release(cell)

    def _make_room(self) -> bool:
        """Whether a slot is free, evicting somebody unpinned if need be."""
        self._residency.regain(self._transfer.may_write)
        if self._residency.free:
            return True
        victim = self._policy.victim(self._residency.can_evict)
        if victim is None:
            return False
        self._residency.evict(victim)
        return True


class _LayerRun:
    """One submitted layer: what is still to compute, to read, and to ask for."""

    def __init__(
        self,
        store: ExpertStore,
        x: Tensor,
        weights: Tensor,
        groups: dict[int, Tensor],
        hits: list[int],
        misses: deque[int],
    ) -> None:
        self._store = store
        self._x = x
        self._mix = weights
        self._groups = groups
        self._ready = deque(hits)  # resident and pinned
        self._unasked = misses  # without a slot
        self._loading: deque[tuple[int, int]] = deque()  # (ticket, cell), slot assigned and pinned
        # Places without an expert stay 0, so that their rows add nothing.
        self._rows = x.new_zeros(weights.numel(), x.shape[1])  # [T·K, D]

    def ask(self) -> None:
        """Gives slots to as many misses as can have one, and asks for their bytes."""
        store, cells = self._store, []
        while self._unasked and store._make_room():
            cell = self._unasked.popleft()
            store._residency.assign(cell)
            cells.append(cell)
        if cells:
            slots = [store._residency.slot_of(cell) for cell in cells]
            self._loading.extend(zip(store._transfer.demand(cells, slots), cells, strict=True))

    def result(self) -> Tensor:
        """[T, D]. Raises ExpertReadError, after which the store is idle again."""
        try:
            while self._ready or self._loading:
                # While slots are wanted, one by one: each that is done makes room for a miss.
                count = 1 if self._unasked else len(self._ready)
                ready = [self._ready.popleft() for _ in range(min(count, len(self._ready)))]
                self._compute(ready or [self._arrived()])
                if self._unasked:
                    self.ask()
            if self._unasked:
                raise self._store._transfer.no_slot(self._unasked[0])
        except BaseException:
            self.abandon()
            raise
        self._store._open = None
        rows = self._rows.view(*self._mix.shape, -1)  # [T, K, D]
        return self._store._slots.combine(rows, self._mix)

    def _compute(self, cells: list[int]) -> None:
        """Pinned resident experts on their rows; unpinned afterwards, whatever happens."""
        store = self._store
        try:
            experts = [(store._residency.slot_of(cell), self._groups[cell]) for cell in cells]
            store._slots.run(self._x, experts, self._mix.shape[1], self._rows)
        finally:
            for cell in cells:
                store._finish(cell)

    def _arrived(self) -> int:
        """Waits for the miss that was asked for first; it is resident and pinned then."""
        store = self._store
        ticket, cell = self._loading[0]
        start = time.perf_counter()
        try:
            store._transfer.wait(ticket, cell)
        except ExpertReadError:
            self._loading.popleft()
            store._give_up(cell)
            raise
        waited, size = time.perf_counter() - start, store._transfer.bytes_of(cell)
        self._loading.popleft()
        store._residency.loaded(cell)
        store.stats.loads += 1
        store.stats.bytes_read += size
        store.stats.stall_seconds += waited
        if store._decoding:
            store.stats.decode_loads += 1
            store.stats.decode_bytes_read += size
            store.stats.decode_stall_seconds += waited
        return cell

    def abandon(self) -> None:
        """Gives back pins and slots, after the reads into them have ended."""
        while self._loading:  # each leaves the list before anything can interrupt the next
            ticket, cell = self._loading.popleft()
            self._store._transfer.abandon(ticket)
            self._store._give_up(cell)
        while self._ready:
            self._store._finish(self._ready.popleft())
        self._unasked.clear()
        self._store._open = None
