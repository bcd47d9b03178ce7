"""The expert store: run the routed experts of every layer from a cache smaller than the model.

Does not know families, text or requests. It satisfies the `Experts` protocol of models/base.py
without importing it. Residency never changes a result, unless a lossy option is set: each selected
expert fills its own rows, and the K rows of a token are combined in a fixed order.

One layer, in order of time:

    submit    prefetches have arrived or are cancelled; the policy receives the routing; hits are
              pinned
    hint      the policy receives the next layer's probable choice (models give hints at once; the
              last layer has none)
    (start)   misses take free slots or those of the policy's victims, and their reads are queued;
              a miss whose prefetch is in flight is promoted; then the policy's prefetches follow
    (model)   computes its shared experts meanwhile
    result    compute the hits, then each miss as it arrives; every finished expert is unpinned, so
              that its slot can serve a miss without a slot. So a layer may have more distinct
              experts than there are slots, and cannot deadlock while there is one slot

Without prefetches, a layer whose experts are all resident only computes them.

Tiers are a list, the host's first. With a device's above, a runner opens each layer (see
layer_runner.py): it computes the device's experts there, and the host provides the rest.

The policy receives events in the order of policy/base.py, like in the simulator. Given the same
routing and the same moments of arrival, hits, reads and victims are the same.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
from torch import Tensor

from moeinf.native import DeviceError, SlotKernel
from moeinf.offload.policy.base import Policy, Prefetch
from moeinf.offload.routing.recent_use import RecentUse
from moeinf.offload.store.host_tier import HostTier
from moeinf.offload.store.layer_run import LayerRun
from moeinf.offload.store.lossy.low_copies import LowCopies
from moeinf.offload.store.lossy.skipping import without_light_misses
from moeinf.offload.store.prefetch import expected
from moeinf.offload.store.prefetch_gate import Gate
from moeinf.offload.store.resident_layers import NativeLayerExperts, ResidentLayer
from moeinf.offload.store.routed import cells_of
from moeinf.offload.store.stats import StoreStats
from moeinf.offload.store.tier import Pending, Runner, Tier, Upper


class Stopped(Exception):
    """A running pass was cancelled, without an effect on the store."""


@dataclass(frozen=True)
class Choice:
    """A host policy, the most prefetches that it may request after a layer, and its hints.

    hints: True if hints of a next layer's gate are used while decoding.
    """

    policy: Policy
    most_prefetches: int = 0
    hints: bool = False


class ExpertStore(NativeLayerExperts):
    """All layers' experts, cached in the slots of one or two tiers."""

    def __init__(
        self,
        tiers: tuple[HostTier] | tuple[HostTier, Upper],
        runner: Runner | None = None,
        *,
        most_prefetches: int = 0,
        hints: bool = False,
        choose: Callable[[int], Choice] | None = None,
        worth_share: float = 0.0,
        skip_below: float = 0.0,
        low: LowCopies | None = None,
    ) -> None:
        """Set up the store.

        tiers: the host's, and a device's above it.
        runner: opens the layers and uses the tiers above; None: the host's tier opens them.
        most_prefetches, hints: see Choice.
        choose: returns the Choice for another number of host slots; None: it never changes.
        worth_share: the least share of decode time spent waiting at which prefetches and hints are
        used, if they also pay for what they cost; 0: always.
        skip_below: the share of a row's weights below which a decoded token does without an absent
        expert (skipping.py); 0: never. low: computes light absent experts with copies in fewer
        bits; None: never. Both need the host's tier alone.
        """
        assert not ((skip_below or low) and len(tiers) > 1), "lossy: the host's tier alone"
        self.host, self.tiers = tiers[0], cast("tuple[Tier, ...]", tiers)
        self.above = cast("tuple[Upper, ...]", tiers[1:])
        self._runner: Runner = runner or self.host
        self._most_prefetches, self._hints, self._choose = most_prefetches, hints, choose
        self._gate = Gate(worth_share, tries=worth_share > 0 and not self.above)
        self._skip_below, self.low = skip_below, low
        self.recent = RecentUse(self.host.experts)
        self._began, self._stalled = 0.0, 0.0  # at the pass's start: time, stall_seconds
        self._open: LayerRun | None = None
        self._hinted: tuple[int, Tensor] | None = None  # given before the layer that is submitted
        self._expected: list[Prefetch] = []  # of a long pass's next layer
        self.stopped: Callable[[], bool] = lambda: False  # asked once per layer

    @property
    def stats(self) -> StoreStats:
        return self.host.stats

    @property
    def device(self) -> Upper | None:
        """The tier of a device; None: there is no such tier."""
        return self.above[0] if self.above else None

    @property
    def wants_hints(self) -> bool:
        """True while hints are useful; False once a tier above holds all experts permanently."""
        self._gate.asks()  # what follows until `hint` is the price of a hint
        if self.host.pieces:
            return self._most_prefetches > 0 and not self.host.all_fit
        wanted = self._hints and self.host.decoding and self._gate.open
        return wanted and not any(tier.complete for tier in self.above)

    @property
    def resident(self) -> int:
        """Experts in host slots now."""
        return self.host.count

    @property
    def device_resident(self) -> int:
        """Experts in slots above the host's."""
        return sum(tier.count for tier in self.above)

    @property
    def idle(self) -> bool:
        """True if nothing is pinned; waits for the copies in flight."""
        with suppress(DeviceError):  # no copy reads anything after a device error
            for tier in self.above:
                tier.end_copies()
        return self.host.idle

    @property
    def direct_io(self) -> bool:
        """True if every read has bypassed the page cache."""
        return self.host.direct_io

    def warm(self, cells: Iterable[int]) -> int:
        """Read these into empty host slots, in order, at the lowest priority; return how many fit.

        Where a tier holds all experts, the others follow while there is room: then no token has to
        wait for the drive.
        """
        every = self.host.all_fit
        count = self.host.warm(cells, None if every else "predicted")
        if every or any(tier.wants_all for tier in self.above):
            count += self.host.warm(range(self.host.table.cells), None)
        return count

    def resize(self, slots: int) -> None:
        """Use this number of host slots from now on, between passes.

        A host that held all experts has no history of their use; it gets the policy that it would
        have had. Raises ExpertReadError where hung reads hold the slots.
        """
        assert not self.above, "a device has locked the slots"
        assert self._choose is not None
        self.abandon()
        host, cells = self.host, self.host.table.cells
        if host.all_fit != (min(slots, host.table.most) >= cells):
            choice = self._choose(slots)
            host.use(choice.policy)
            self._most_prefetches, self._hints = choice.most_prefetches, choice.hints
        host.resize(slots)

    def begin_pass(
        self,
        rows: Tensor,
        phase: Literal["encode", "prefill", "decode"],
        pieces: Sequence[slice] = (),
    ) -> None:
        assert not (pieces and self.above), "a device computes one piece"
        self.abandon()
        self._began, self._stalled = 0.0, self.stats.stall_seconds
        if self._most_prefetches and phase == "decode" and not self.host.decoding:
            self.host.measure_from_here()
        requests = rows.numpy()
        self.recent.begin()
        for tier in self.tiers:
            tier.begin_pass(requests, phase)
        if pieces:
            self.host.begin_long(pieces)

    def end_request(self, request: int) -> None:
        """End the request: no further pass names it."""
        for tier in self.tiers:
            tier.policy.end_request(request)

    def hint(self, layer: int, ids: Tensor, scores: Tensor) -> None:
        """Keep ids [T, H], the surest first, of the layer after the one that is submitted next."""
        self._hinted = layer, ids
        self._gate.answered()

    def end_pass(self, accepted_rows: Tensor | None = None) -> None:
        self.abandon()
        if self.host.decoding and self._began:
            waited = self.stats.stall_seconds - self._stalled
            seconds = time.perf_counter() - self._began
            if self._most_prefetches:
                self.host.measure(seconds - waited)
            self._gate.passed(waited, seconds, self.host.judge.saved)
        accepted = None if accepted_rows is None else accepted_rows.numpy()
        try:
            for tier in self.above:
                tier.end_pass(accepted)
        finally:
            self.host.end_pass(accepted)
        if accepted is None or accepted.any():
            self.recent.end()

    def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Pending:
        """Open a layer and queue its misses.

        Raises Stopped when the pass is cancelled, ExpertReadError when a shard cannot be read, and
        a device's errors. Then the store is idle.
        """
        self._start()
        hinted, self._hinted = self._hinted, None
        if self._skip_below and self.host.decoding:
            ids = self._without_light_misses(layer, ids, weights)
        self.recent.add(layer, ids)
        if not self._most_prefetches and self._runner is self.host:
            there = self.host.native_layer(layer, x, ids, weights)
            if there is not None:
                return there
        opened = self._runner.open(layer, x, ids, weights, hinted)
        if not isinstance(opened, tuple):
            return opened
        host, (routed, hint, work) = self.host, opened
        begin = host.clock()
        if not self._most_prefetches and host.table.are_resident(routed.places):
            if not host.all_fit:  # else no cell ever has to leave
                host.policy.routed(layer, routed.ids, routed.weights)
            host.used(routed, routed.cells, routed.events)
            host.decided(begin)
            return ResidentLayer(work, sorted(routed.cells))
        host.settle()
        is_resident = host.table.is_resident
        hits, misses = list[int](), deque[int]()
        for cell in routed.cells:
            (hits if is_resident(cell) else misses).append(cell)
        host.policy.routed(layer, routed.ids, routed.weights)
        self._expected = []
        if hint is not None and host.pieces:
            self._expected = expected(*hint, host.experts)
        elif hint is not None:
            self._gate.asks()
            host.policy.hinted(*hint)
            self._gate.answered()
        for cell in hits:
            host.table.pin(cell)
        host.used(routed, hits, routed.events_of(hits))
        run = self._open = LayerRun(self, layer, work, hits, misses)
        if misses and self.low is not None and host.decoding:
            self.low.take(routed, weights, misses)
        host.decided(begin)
        run.ask()
        return run

    def slots(self, layer: int) -> SlotKernel | None:
        """Return what computes a layer whose experts are all in host slots; see NativeLayerExperts.

        Raises Stopped when the pass is cancelled.
        """
        skips = self._skip_below and self.host.decoding
        if self._most_prefetches or self._runner is not self.host or skips:
            return None
        self._start()
        return self.host.slots_of(layer)

    def computed(self, layer: int, ids: Tensor, weights: Tensor, events: int) -> None:
        """See NativeLayerExperts."""
        self._hinted = None
        self.recent.add(layer, ids)
        self.host.computed(layer, ids, weights, events)

    def _start(self) -> None:
        """Start a layer; raise Stopped when the pass is cancelled."""
        if self.stopped():
            self.abandon()
            raise Stopped
        self._began = self._began or time.perf_counter()

    def _without_light_misses(self, layer: int, ids: Tensor, weights: Tensor) -> Tensor:
        host = self.host
        begin = host.clock()
        host.settle()
        resident = host.resident(cells_of(layer, ids.numpy(), host.experts))
        kept = without_light_misses(ids, weights, resident, self._skip_below)
        self.stats.decode_events_skipped += int((kept != ids).sum())
        host.decided(begin)
        return kept

    def abandon(self) -> None:
        """End the open layer, if there is one, after an error has ended its pass.

        Kernels that are queued still run, into rows that nothing reads.
        """
        self._hinted = None
        if self._open is not None:
            self._open.abandon()

    def close(self) -> None:
        """End copies and readers, and free the slots, which may not be used afterwards.

        Slots that a device has locked are freed with its last reference to them.
        """
        self.abandon()
        try:
            for tier in self.above:
                tier.close()
        finally:
            self.host.close(locked=bool(self.above))
            if self.low is not None:
                self.low.close()

    def prefetch(self, layer: int) -> None:
        """Queue the host policy's prefetches after `layer`, except experts that a tier above has.

        A long pass prefetches the next layer's experts instead.
        """
        if self.host.pieces:
            self.host.prefetch(self._expected)
            return
        if not self._most_prefetches or not self._gate.open:
            return
        self._gate.asks()
        prefetches = self.host.worth(self.host.policy.prefetch(self._most_prefetches), layer)
        for tier in self.above:
            here = tier.resident(np.array([p.cell for p in prefetches], np.intp)).tolist()
            prefetches = [p for p, there in zip(prefetches, here, strict=True) if not there]
        self.host.prefetch(prefetches)
        self._gate.answered()

    def ended(self) -> None:
        """Report that no layer is open any more."""
        self._open = None
