"""The expert store: runs the routed experts of every layer from a cache smaller than the model.

Does not know families, text or requests. It satisfies the `Experts` protocol of models/base.py
without importing it. Which experts are resident never changes a result: each selected expert fills
its own rows, and the K rows of a token are combined in a fixed order.

One layer, as time runs:

    submit    what was read ahead has arrived or is cancelled; the policy hears the routing; hits
              are pinned
    hint      the policy hears what the next layer will probably choose (models give hints at once;
              there are none in the last layer)
    (start)   misses take free slots or those of the policy's victims, and their bytes are asked
              for; a miss that is being read ahead is promoted; then the policy's wishes are queued
    (model)   computes its shared experts meanwhile
    result    compute the hits, then each miss as it arrives; every finished expert is unpinned, so
              that its slot can serve a miss that had none: a layer with more distinct experts than
              there are slots runs through them, and cannot deadlock as long as there is one slot

Where nothing is read ahead, a layer whose experts are all there only computes them.

The policy hears events in the order of policy/base.py, which is the simulator's order too: given
the same routing and the same moments of arrival, hits, reads and victims are the same.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal

from torch import Tensor

from moeinf.native import SlotPool
from moeinf.offload.format.layout import ExpertLayout
from moeinf.offload.policy.base import Policy, chosen_cells
from moeinf.offload.store.compute import AllThere, ExpertMath, HostRunner, SlotMath
from moeinf.offload.store.prefetch import ReadAhead
from moeinf.offload.store.prefetch_gate import Throttle
from moeinf.offload.store.residency import Residency
from moeinf.offload.store.stats import StoreStats
from moeinf.offload.store.transfer import ExpertReadError, Transfer


class Stopped(Exception):
    """Somebody asked for an end while a pass was running; the pass has left nothing behind."""


class ExpertStore:
    """L layers of E experts behind `slots` slots of memory."""

    def __init__(
        self,
        layout: ExpertLayout,
        experts: int,
        pool: SlotPool,
        residency: Residency,
        transfer: Transfer,
        policy: Policy,
        math: ExpertMath,
        *,
        wishes: int = 0,
        hints: bool = False,
        worth_share: float = 0.0,
        runner: HostRunner | None = None,
        stats: StoreStats | None = None,
    ) -> None:
        """runner: what computes the experts in the pool's slots; the CPU, where they lie, unless a
        tier above takes part. stats: where it counts, too. wishes: how many the policy is asked for
        after a layer; 0: it has none to make. hints: whether those of a next layer's gate are
        wanted while decoding. worth_share: the share of decode time spent waiting from which either
        is asked for; 0: always."""
        self._experts = experts
        self._residency = residency
        self._transfer = transfer
        self._policy = policy
        self._math = math
        self._wishes, self._hints = wishes, hints
        self._throttle = Throttle(worth_share)
        self._began, self._stalled = 0.0, 0.0  # the pass's first layer: when, and stall_seconds
        self._slots: HostRunner = runner or SlotMath(layout, pool, math)
        self._open: _LayerRun | None = None
        self._hinted: tuple[int, Tensor] | None = None  # told before the layer that is submitted
        self._decoding = False
        self.stats = stats or StoreStats()
        self._ahead = ReadAhead(residency, transfer, policy, self.stats)
        self.stopped: Callable[[], bool] = lambda: False  # asked once per layer
        self.elsewhere: Callable[[int], bool] | None = None  # cells that need no reading ahead

    @property
    def wants_hints(self) -> bool:
        return self._hints and self._decoding and self._throttle.open

    @property
    def resident(self) -> int:
        """Experts in memory now."""
        return self._residency.resident

    @property
    def device_resident(self) -> int:
        """Experts in slots of a device: there is no tier above."""
        return 0

    @property
    def lost(self) -> bool:
        """Of the slots of a device: there are none to lose."""
        return False

    @property
    def note(self) -> str | None:
        """What a face should say of it: nothing."""
        return None

    @property
    def idle(self) -> bool:
        """Whether nothing is pinned: true between passes, however the last one ended."""
        return self._residency.pinned() == 0

    @property
    def direct_io(self) -> bool:
        """Whether every read has passed by the page cache."""
        return self._transfer.direct_io

    def warm(self, cells: Iterable[int]) -> int:
        """Reads these into empty slots, the first first, behind everything else; how many fit."""
        return self._ahead.warm(cells)

    def settle(self) -> None:
        """Between layers: what was read ahead and has arrived is resident from now on."""
        self._ahead.settle()

    def begin_pass(self, rows: Tensor, phase: Literal["encode", "prefill", "decode"]) -> None:
        self.abandon()
        self._decoding = self._ahead.decoding = phase == "decode"
        self._began, self._stalled = 0.0, self.stats.stall_seconds
        begin = self._clock()
        self._policy.begin_pass(rows.numpy(), phase)
        self._decided(begin)

    def end_request(self, request: int) -> None:
        """No further pass names it."""
        self._policy.end_request(request)

    def hint(self, layer: int, ids: Tensor, scores: Tensor) -> None:
        """ids [T, H], the surest first, of the layer after the one that is submitted next."""
        if self.wants_hints:
            self._hinted = layer, ids

    def end_pass(self, accepted_rows: Tensor | None = None) -> None:
        self.abandon()
        if self._decoding and self._began:
            waited = self.stats.stall_seconds - self._stalled
            self._throttle.passed(waited, time.perf_counter() - self._began)
        begin = self._clock()
        self._policy.end_pass(None if accepted_rows is None else accepted_rows.numpy())
        self._decided(begin)

    def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> _LayerRun | AllThere:
        """Raises Stopped when asked to end, ExpertReadError when a shard cannot be read."""
        if self.stopped():
            self.abandon()
            raise Stopped
        self._began = self._began or time.perf_counter()
        hinted, self._hinted = self._hinted, None
        groups = {
            layer * self._experts + expert: places
            for expert, places in self._math.group(ids, self._experts)
        }
        begin = self._clock()
        if not self._wishes and self._residency.are_resident(groups):
            if not self._residency.all_fit:  # else nobody will have to leave, whatever is used
                self._policy.routed(layer, ids.numpy())
            self._count(groups, groups)
            self._decided(begin)
            slot_of = self._residency.slot_of
            experts = [(slot_of(cell), places) for cell, places in groups.items()]
            return AllThere(self._slots, x, weights, experts)
        chosen = ids.numpy()
        self._ahead.settle()
        hits, misses = list[int](), deque[int]()
        for cell in chosen_cells(layer, chosen, self._experts):
            (hits if self._residency.is_resident(cell) else misses).append(cell)
        self._policy.routed(layer, chosen)
        if hinted is not None:
            self._policy.hinted(hinted[0], hinted[1].numpy())
        run = self._open = _LayerRun(self, x, weights, groups, misses)
        for cell in hits:
            self._residency.pin(cell)
            run.ready.append(cell)
        self._count(groups, hits)
        self._decided(begin)
        run.ask()
        return run

    def close(self) -> None:
        """Ends the readers; the slots must not be used afterwards."""
        self.abandon()
        self._transfer.close()

    def shrink(self) -> bool:
        """Whether a device's memory was given back: there is none."""
        return False

    def give_up(self, size_bytes: int, of_slots_bytes: int) -> int | None:
        """How many slots of a device were given back: there is none."""
        return None

    def abandon(self) -> None:
        """Ends the open layer, if there is one: for a pass that an error has cut off."""
        self._hinted = None
        if self._open is not None:
            self._open.abandon()

    def _count(self, groups: dict[int, list[int]], hits: Iterable[int]) -> None:
        events = sum(map(len, groups.values()))
        hit_events = events if hits is groups else sum(len(groups[cell]) for cell in hits)
        if self._decoding:
            self.stats.decode_events += events
            self.stats.decode_hits += hit_events
        else:
            self.stats.prefill_events += events
            self.stats.prefill_hits += hit_events
        if not self._ahead.waits_for_use:
            return
        for cell in hits:
            cause = self._ahead.used(cell)
            if cause is not None and self._decoding:
                if cause == "hinted":
                    self.stats.decode_hits_hinted += len(groups[cell])
                else:
                    self.stats.decode_hits_predicted += len(groups[cell])

    def _clock(self) -> float:
        """Seconds; stands still while the queue is told, whose readers may take the processor."""
        return time.perf_counter() - self._transfer.telling_seconds

    def _decided(self, begin: float) -> None:
        """Since `begin` of the clock it was decided who comes and who leaves."""
        if self._decoding:
            self.stats.decode_policy_seconds += self._clock() - begin

    def _wish(self) -> None:
        if self._wishes and self._throttle.open:
            wishes = self._policy.prefetch(self._wishes)
            if (elsewhere := self.elsewhere) is not None:
                wishes = [wish for wish in wishes if not elsewhere(wish.cell)]
            self._ahead.wish(wishes)

    def _give_up(self, cell: int) -> None:
        """The read into the cell's slot has ended badly, or is given up."""
        self._policy.forget([cell])  # it was told of an arrival
        self._residency.give_up(cell, self._transfer.may_write)

    def _make_room(self) -> bool:
        """Whether a slot is free, at the cost of reads ahead or of somebody unpinned if need be."""
        self._residency.regain(self._transfer.may_write)
        if self._residency.free or self._ahead.give_way():
            return True
        victim = self._policy.victim(self._residency.can_evict)
        if victim is None:
            return False
        self._ahead.evict(victim)
        return True


class _LayerRun:
    """One submitted layer: what is still to compute, to read, and to ask for."""

    def __init__(
        self,
        store: ExpertStore,
        x: Tensor,
        weights: Tensor,
        groups: dict[int, list[int]],
        misses: deque[int],
    ) -> None:
        self._store = store
        self._x = x
        self._mix = weights
        self._groups = groups
        self.ready = deque[int]()  # resident and pinned
        self._unasked = misses  # without a slot
        self._loading: deque[tuple[int, int]] = deque()  # (ticket, cell), slot assigned and pinned
        # Places without an expert stay 0, so that their rows add nothing.
        self._rows = store._slots.rows(x, weights.numel())  # [T·K, D]

    def ask(self) -> None:
        """Gives slots to as many misses as can have one, and asks for their bytes; then for what
        the policy wishes ahead."""
        store, begin = self._store, self._store._clock()
        tickets: dict[int, int] = {}
        absent = []
        while self._unasked:
            cell = self._unasked[0]
            ticket = store._ahead.take(cell)
            if ticket is not None:
                tickets[cell] = ticket
            elif store._make_room():
                store._residency.assign(cell)
                absent.append(cell)
                tickets[cell] = 0
            else:
                break
            self._unasked.popleft()
            store._policy.admitted(cell)
        if absent:
            try:
                slots = [store._residency.slot_of(cell) for cell in absent]
                tickets.update(zip(absent, store._transfer.demand(absent, slots), strict=True))
            except BaseException:
                for cell in absent:
                    del tickets[cell]
                    store._give_up(cell)
                self._loading.extend((ticket, cell) for cell, ticket in tickets.items())
                raise
        self._loading.extend((ticket, cell) for cell, ticket in tickets.items())
        if not self._unasked:
            store._wish()
        store._decided(begin)

    def result(self) -> Tensor:
        """[T, D]. Raises ExpertReadError, after which the store is idle again."""
        try:
            while self.ready or self._loading or self._unasked:
                if not self.ready and not self._loading:  # copies or reads ahead hold every slot
                    if not (self._store._slots.end_copies() or self._store._ahead.wait_for_one()):
                        raise self._store._transfer.no_slot(self._unasked[0])
                    self.ask()
                    continue
                # While slots are wanted, one by one: each that is done makes room for a miss.
                count = 1 if self._unasked else len(self.ready)
                ready = [self.ready.popleft() for _ in range(min(count, len(self.ready)))]
                self._compute(ready or [self._arrived()])
                if self._unasked:
                    self.ask()
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
                store._residency.unpin(cell)

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
            try:
                self._store._transfer.abandon(ticket)
            finally:  # a second Ctrl-C may cut off its wait
                self._store._give_up(cell)
        while self.ready:
            self._store._residency.unpin(self.ready.popleft())
        self._unasked.clear()
        self._store._open = None
