"""Replay a recording on device slots above host slots above a disk, like layer_runner.py runs.

It moves names between two Residencies, with the engine's policies and Split. It repeats the calls
of expert_store.py, host_tier.py, layer_runner.py and device_slots.py, in their order. Where a
clock decides (is the bus idle, has a copy released its host slot), it is the model's. A bus that
takes no time copies like a device that is never behind.

One layer, four clocks:

    device   dense share │ hits ──────────── what was fetched, batch by batch ─────┐
    bus                  │   batches that are fetched                              │ promotions
    thread               │ the CPU's share of the hosts' hits; then of each miss  ─┴▶ next layer
    link                 │ what neither memory has ─ what the policy prefetches

The thread is the CPU: it waits for reads, at the end for the device, and never for a promotion. A
promotion holds the bus, and its host slots, until it has ended. *Stall* is the end of a layer less
the device's time for it, if all experts were on the device.

It is longer than most files because it covers four of the engine's.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from math import inf, nextafter

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.gpu_tier.miss_split import FEW_ROWS, Split
from moeinf.offload.policy.base import Passive, Policy, Setup, Weights, chosen_cells
from moeinf.offload.policy.lru import Lru
from moeinf.offload.routing.eamc import Eamc
from moeinf.offload.routing.trace import Ids, Pass, Recording
from moeinf.offload.simulator.clock import Link
from moeinf.offload.simulator.replay import Conditions, MakePolicy, Walk
from moeinf.offload.simulator.simulated_device import Above, ReplayedTier
from moeinf.offload.store.residency import Residency


class TieredReplay(Walk):
    """One policy for both tiers, an object each; `run` once."""

    def __init__(
        self,
        recording: Recording,
        make: MakePolicy,
        conditions: Conditions,
        above: Above,
        eamc: Eamc | None = None,
    ) -> None:
        """Set up the replay. conditions: of the host's tier; late routing is not replayed."""
        assert not conditions.late, "a store tells its policies at once"
        super().__init__(recording, conditions, eamc)
        shape, speeds = self._shape, above.speeds
        cells = shape.layers * shape.experts

        def made(slots: int) -> Policy:  # where no expert ever leaves, the engine runs the cheapest
            setup = Setup(shape, slots, eamc)
            return Lru(setup) if slots >= cells else make(setup)

        self._policy = made(conditions.slots)
        self._host = Residency(conditions.slots, cells)
        copy = shape.expert_bytes / speeds.bus_bytes_per_s
        self._device = ReplayedTier(
            Residency(above.slots, cells), made(above.slots), self._host, copy
        )
        self.policies = [self._policy, self._device.policy]
        self._miss, self._speeds = above.miss, speeds
        self._split = Split(speeds.fetched_share if above.share is None else above.share)
        self._dense = shape.dense_bytes / shape.layers / speeds.device_bytes_per_s
        self._on_device = shape.expert_bytes / speeds.device_bytes_per_s
        self._on_cpu = shape.expert_bytes / speeds.cpu_bytes_per_s
        self._read = conditions.time.read_seconds(shape)
        self._link = Link(
            self._read, conditions.time.piece_seconds(), self._begin_ahead, self._drop_ahead
        )
        self._ahead: set[int] = set()  # prefetched, neither used nor evicted yet
        self._most_prefetches = 0 if isinstance(self._policy, Passive) else 2 * shape.top_k
        self._found, self._missed = 0, 0  # of the running pass: experts on the device, and others
        # State of the running layer:
        self._weights: Weights | None = None
        self._rows = Counter[int]()  # per cell
        self._ready, self._unasked = deque[int](), deque[int]()
        self._loading: deque[tuple[float, int]] = deque()  # (time of arrival, cell)
        self._device_done = 0.0
        self._promotable: list[int] = []  # computed by the CPU
        self._ring: list[int] = []  # of a prefill: cells of the last queued kernels

    def _pass(self, running: Pass, hinted: NDArray[np.int16] | None) -> None:
        token, begin, insertions = self._token, self._now, self._policy.insertions
        for policy in self.policies:
            policy.begin_pass(running.rows, running.phase)
        hints = hinted if self._decoding else None  # a store uses no hints in a prompt
        reads, self._found, self._missed = self.outcome.demand_reads, 0, 0
        for layer, ids in enumerate(running.ids):
            if (ids < 0).all():
                continue
            self._now += self._dense
            token.floor_seconds += self._dense
            told = hints[layer + 1] if hints is not None and layer + 1 < len(hints) else None
            self._weights = None if running.weights is None else running.weights[layer]
            self._layer(layer, ids, told)
        for policy in self.policies:
            policy.end_pass(running.accepted)
        token.seconds += self._now - begin
        token.insertions += self._policy.insertions - insertions
        token.floor_seconds += self._floor(self.outcome.demand_reads - reads)

    def _layer(self, layer: int, ids: Ids, hinted: Ids | None) -> None:
        """Run a layer like TierRunner.open, then ExpertStore; hinted [T, H]: the next layer's."""
        device, start = self._device, self._now
        self._link.run_until(start)
        cells = chosen_cells(layer, ids, self._shape.experts)
        self._rows = self._count(layer, ids)
        device.policy.routed(layer, ids, self._weights)
        there = [cell for cell in cells if device.has(cell)]
        self._found += len(there)
        self._missed += len(cells) - len(there)
        self._ring = []
        self._compute(sorted(there))
        begin = max(start, device.there_at(there, start))
        self._device_done = begin + len(there) * self._on_device
        self._count_hits(there, on_device=True)
        at_once = self._submit(layer, self._below(layer, ids))
        if hinted is not None:
            device.policy.hinted(layer + 1, hinted)
            if not at_once:
                self._policy.hinted(layer + 1, self._below(layer + 1, hinted))
        if at_once:
            now = self._run(sorted(self._ready), start)
            self._ready.clear()
        else:
            now = self._result(self._ask(start))
        now = max(now, self._device_done)
        self._promote(now)
        self._token.stall_seconds += now - start - len(cells) * self._on_device
        self._now = now

    def _submit(self, layer: int, ids: Ids) -> bool:
        """Submit like ExpertStore.submit; return True if all are resident, without prefetches.

        Then no cell is pinned and all are computed in the order of their numbers.
        """
        cells = chosen_cells(layer, ids, self._shape.experts)
        at_once = not self._most_prefetches and self._host.are_resident(cells)
        for cell in self._link.arrived(self._now):
            self._host.loaded(cell)
            self._policy.admitted(cell)
        for cell in cells:
            (self._ready if self._host.is_resident(cell) else self._unasked).append(cell)
        self._policy.routed(layer, ids, self._weights)
        if not at_once:
            for cell in self._ready:
                self._host.pin(cell)
        self._count_hits(self._ready)
        if self._decoding:
            self.outcome.used_ahead += len(self._ahead.intersection(cells))
        self._ahead.difference_update(cells)
        return at_once

    def _ask(self, now: float) -> float:
        """Give free slots to the first misses; then queue the policy's prefetches."""
        self._link.hasten(self._unasked)
        while self._unasked:
            cell = self._unasked[0]
            there = self._link.arriving.pop(cell, None)
            if there is not None:
                self._host.pin(cell)
            elif self._make_room():
                self._host.assign(cell)
                there = self._link.demand(now)
                self._token.reads += self._decoding
                self.outcome.demand_reads += self._decoding
            else:
                return now
            self._unasked.popleft()
            self._policy.admitted(cell)
            self._loading.append((there, cell))
        if self._most_prefetches:
            prefetches = self._policy.prefetch(self._most_prefetches)
            self._link.prefetch((w.cell for w in prefetches if not self._device.has(w.cell)), now)
            self._link.run_until(nextafter(now, inf))  # reads that can begin at once
        return now

    def _result(self, now: float) -> float:
        """Return the time when the CPU's part and all reads have ended, like LayerRun.result."""
        while self._ready or self._loading or self._unasked:
            if not self._ready and not self._loading:
                now = self._ask(self._free_a_slot(now))
                continue
            if self._ready:
                count = 1 if self._unasked else len(self._ready)
                cells = [self._ready.popleft() for _ in range(count)]
            else:
                there, cell = self._loading.popleft()
                self._host.loaded(cell)
                now, cells = max(now, there), [cell]
            now = self._run(cells, now)
            for cell in cells:
                self._host.unpin(cell)
            if self._unasked:
                now = self._ask(now)
        return now

    def _free_a_slot(self, now: float) -> float:
        """Return when the copies, or the first prefetch, have ended; they hold every slot."""
        ended = self._device.end_copies()
        if ended is not None:
            return max(now, ended)
        cell = next(iter(self._link.arriving))
        there = self._link.arriving.pop(cell)
        self._drop_ahead(cell)
        return max(now, there)

    def _run(self, cells: Sequence[int], now: float) -> float:
        """Run cells in host slots like DeviceWork.compute; return when the CPU's part has ended."""
        fetched, computed = self._divide(cells, now)
        most = max(1, self._device.slots // 2)
        while fetched:
            brought = self._device.bring(fetched[:most], now, self._ring)
            self._compute(brought)
            self._token.copies += len(brought) * self._decoding
            begin = max(self._device_done, self._device.there_at(brought, now))
            self._device_done = begin + len(brought) * self._on_device
            fetched = fetched[len(brought) :]
        self._promotable += computed
        if self._decoding:
            self._token.cpu_events += sum(self._rows[cell] for cell in computed)
        return now + len(computed) * self._on_cpu

    def _compute(self, cells: list[int]) -> None:
        """Note cells whose kernels are queued."""
        if not self._decoding:
            self._ring = [*self._ring, *cells][-max(1, self._device.slots // 2) :]

    def _divide(self, cells: Sequence[int], now: float) -> tuple[list[int], list[int]]:
        """Return the cells to fetch, and those that the CPU computes."""
        if self._miss == "compute":
            return [], list(cells)
        if self._miss == "fetch" or self._device.all_fit:
            return list(cells), []
        fetched = [cell for cell in cells if self._rows[cell] > FEW_ROWS]
        few = [cell for cell in cells if self._rows[cell] <= FEW_ROWS]
        few.sort(key=lambda cell: not self._device.policy.keeps(cell))
        count = self._split.fetched(len(few), self._device.on_their_way(now) + len(fetched))
        return fetched + few[:count], few[count:]

    def _promote(self, now: float) -> None:
        if self._promotable and self._device.bus_is_idle(now):
            there = (cell for cell in self._promotable if self._host.is_resident(cell))
            worth = [cell for cell in there if self._device.policy.keeps(cell)]
            if worth:
                self._token.copies += len(self._device.bring(worth, now)) * self._decoding
        self._promotable = []

    def _make_room(self) -> bool:
        if self._host.free:
            return True
        victim = self._policy.victim(self._host.can_evict)
        if victim is None:
            return False
        self._host.evict(victim)
        self._ahead.discard(victim)
        return True

    def _begin_ahead(self, cell: int) -> bool:
        """Begin a prefetch, if there is room; return whether it began."""
        if self._host.has_slot(cell) or not self._make_room():
            return False
        self._host.assign(cell, pinned=False)
        self._ahead.add(cell)
        self._token.reads += self._decoding
        self.outcome.fetched_ahead += self._decoding
        return True

    def _drop_ahead(self, cell: int) -> None:
        self._host.release(cell)
        self._ahead.discard(cell)

    def _below(self, layer: int, ids: Ids) -> Ids:
        """Return ids with -1 for those on the device."""
        first = layer * self._shape.experts
        here = [e for e in set(ids.ravel().tolist()) if e >= 0 and self._device.has(first + e)]
        return np.where(np.isin(ids, here), ids.dtype.type(-1), ids) if here else ids

    def _count(self, layer: int, ids: Ids) -> Counter[int]:
        first = layer * self._shape.experts
        return Counter(first + expert for expert in ids.ravel().tolist() if expert >= 0)

    def _count_hits(self, cells: Iterable[int], on_device: bool = False) -> None:
        if self._decoding:
            events = sum(self._rows[cell] for cell in cells)
            self._token.hits += events
            if on_device:
                self._token.events += self._rows.total()
                self._token.device_hits += events

    def _floor(self, reads: int) -> float:
        """Return the least time of the experts of the last pass, with that many demand reads.

        All run at once, and the misses of the device are divided in the best way.
        """
        size = self._shape.expert_bytes
        computed = self._speeds.floor_seconds(self._found * size, self._missed * size)
        return max(computed, reads * self._read)
