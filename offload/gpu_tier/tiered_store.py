"""The expert store of a machine with a GPU: device slots above host slots above the disk.

Does not know families, files or kernels. It is an `Experts` around an ExpertStore, which keeps all
its business (host slots, reads, waves); for what is in a device slot it is not even asked.

One layer, as time runs:

    submit    the tier's policy hears the routing; kernels for what is in device slots are queued;
              the host store is given the rest (ids of the others become -1)
    result    the host store hands over what it has, as it arrives, to `TierRunner`:
                fetch    copied to a device slot, in batches of what there is room for, and computed
                         there: the device computes everything, so residency chooses nothing
                compute  computed on the CPU where it lies, while the device computes its own
                auto     so many of each that the later ends soonest (miss_split.py); experts of
                many
                         rows are always fetched, since the CPU reads weights once and computes per
                         row, and all where everybody has a slot, since nobody is fetched twice
              the device's rows come down, and the K rows of a token are summed in a fixed order
    (after)   while the bus is idle, what was computed on the CPU and the policy would keep is
              promoted: copied into a device slot, which the next layers do not wait for. Where
              everybody has a slot, what lies in RAM follows unasked, from pass to pass

With the dense weights on the device, too (`inside`), a layer reads its routing from there, with it
a hint, and x where the CPU may compute some of it, before anything is queued. A layer whose
experts are all on the device for good does not even read that: kernels find them through a table
of slots, and its routing is counted when the pass ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Literal, Protocol

import torch
from torch import Tensor

from moeinf.native import DeviceError
from moeinf.offload.gpu_tier.device_slots import DeviceTier
from moeinf.offload.gpu_tier.layer_runner import TierRunner
from moeinf.offload.gpu_tier.page_lock import PageLocking
from moeinf.offload.policy.base import chosen_cells
from moeinf.offload.store.compute import ExpertMath
from moeinf.offload.store.expert_store import ExpertStore, Stopped
from moeinf.offload.store.stats import StoreStats


class Pending(Protocol):
    """A submitted layer."""

    def result(self) -> Tensor:
        """[T, D]."""
        ...


class TieredStore:
    """`Experts` over three tiers. Made by runtime/engine/loader.py, which knows the sizes."""

    def __init__(
        self,
        tier: DeviceTier,
        host: ExpertStore,
        runner: TierRunner,
        math: ExpertMath,
        experts: int,
        locking: PageLocking,
        inside: bool = False,
    ) -> None:
        """locking: of the host store's slots; ended with the store. inside: whether what a layer
        is given lies on the device."""
        self._inside, self._planned = inside, tier.slots
        self._hinted: tuple[int, Tensor, Tensor] | None = None  # before the layer is submitted
        self._uncounted: list[Tensor] = []  # routing on the device, of this pass
        self._tier, self._host, self._runner = tier, host, runner
        self._locking = locking
        self._math, self._experts = math, experts
        host.elsewhere = tier.is_resident

    @property
    def stats(self) -> StoreStats:
        return self._host.stats

    @property
    def wants_hints(self) -> bool:
        """Not once everybody is on the device for good."""
        gone = self._tier.all_fit and not self._tier.lacks_somebody
        return self._host.wants_hints and not gone

    @property
    def resident(self) -> int:
        """Experts in host slots now."""
        return self._host.resident

    @property
    def device_resident(self) -> int:
        return self._tier.resident

    @property
    def device_slots(self) -> int:
        return self._tier.slots

    @property
    def lost(self) -> bool:
        """Whether the device has no slot any more: only a new store will have some."""
        return self._tier.lost

    @property
    def note(self) -> str | None:
        """What could not be page-locked, or was given up, and why; None: nothing to say, yet."""
        if self._tier.slots < self._planned:
            words = f"the GPU ran out of memory: it holds {self._tier.slots} experts now, "
            advice = "a smaller --ctx, or what others hold there, leaves it more"
            return words + f"not {self._planned}; {advice}"
        return self._locking.note

    @property
    def idle(self) -> bool:
        """Whether nothing is pinned; copies that are on their way are waited for."""
        with suppress(DeviceError):  # no copy reads anything any more then
            self._tier.end_copies()
        return self._host.idle

    @property
    def direct_io(self) -> bool:
        return self._host.direct_io

    @property
    def stopped(self) -> Callable[[], bool]:
        return self._host.stopped

    @stopped.setter
    def stopped(self, asked: Callable[[], bool]) -> None:
        self._host.stopped = asked

    def warm(self, cells: Iterable[int]) -> int:
        """Into empty host slots; from there they are promoted by use.

        Where all experts have a slot on the device the others follow these, as far as there is
        room: once all are there, no layer has to read its routing.
        """
        rest = range(self._tier.cells) if self._inside and self._tier.all_fit else ()
        return self._host.warm([*cells, *rest])

    def begin_pass(self, rows: Tensor, phase: Literal["encode", "prefill", "decode"]) -> None:
        self._host.begin_pass(rows, phase)
        self._tier.begin_pass(rows.numpy(), phase)

    def end_pass(self, accepted_rows: Tensor | None = None) -> None:
        routed, self._uncounted = self._uncounted, []
        try:
            if self._inside and accepted_rows is None:  # else it broke off: nothing new may fail
                if routed:
                    self._count(int((self._tier.read(torch.cat(routed)) >= 0).sum()))
                if self._tier.lacks_somebody:
                    self._host.settle()
                    self._tier.bring_absent()
        finally:
            self._host.end_pass(accepted_rows)
            self._tier.end_pass(None if accepted_rows is None else accepted_rows.numpy())

    def end_request(self, request: int) -> None:
        self._host.end_request(request)
        self._tier.policy.end_request(request)

    def hint(self, layer: int, ids: Tensor, scores: Tensor) -> None:
        """Looked at when the next layer is submitted, with its routing."""
        if self.wants_hints:
            self._hinted = layer, ids, scores

    def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Pending:
        """Raises Stopped, ExpertReadError, DeviceError, OutOfMemory; then the store is idle."""
        if self._host.stopped():
            self.abandon()
            raise Stopped
        self._runner.begin()
        hinted, self._hinted = self._hinted, None
        first = layer * self._experts
        if self._inside:
            table = self._tier.table(first, self._experts)
            if table is not None and self._tier.can_route(len(x)):
                self._uncounted.append(ids.flatten())
                return ByTable(self._tier, x, ids, weights, table)
            ids = self._tier.read(ids)
        chosen = ids.numpy()
        self._tier.policy.routed(layer, chosen)
        if hinted is not None:
            self._pass_on(*hinted)
        cells = list(chosen_cells(layer, chosen, self._experts))
        there = {cell for cell in cells if self._tier.is_resident(cell)}
        if self._inside and self._runner.computes_below and len(there) < len(cells):
            self._runner.begin(self._tier.device.download(x))
        if there:
            groups = self._math.group(ids, self._experts)
            hits = [(first + e, places) for e, places in groups if first + e in there]
            if self._runner.on_device(x, hits, ids.shape[1]):
                self._count(sum(len(places) for _, places in hits))
                ids = self._below(layer, ids)
        return self._host.submit(layer, x, ids, weights)

    def abandon(self) -> None:
        """Ends the open layer; kernels that are queued still run, into rows that nobody reads."""
        self._hinted = None
        self._host.abandon()
        self._runner.begin()

    def shrink(self) -> bool:
        """Gives half of the device's slots back, between layers. False: there is but one."""
        return self._tier.shrink()

    def give_up(self, size_bytes: int, of_slots_bytes: int) -> int | None:
        """Gives so much of the device's memory back, between layers, for good: how many slots that
        took; None: not even one would be left. See DeviceTier."""
        before = self._tier.slots
        if not self._tier.give_up(size_bytes, of_slots_bytes):
            return None
        given = before - self._tier.slots
        self._planned -= given
        return given

    def close(self) -> None:
        self._locking.close()
        try:
            self._tier.close()
        finally:
            self._host.close()

    def _pass_on(self, layer: int, ids: Tensor, scores: Tensor) -> None:
        """A hint, to both tiers, before anything of the submitted layer is queued: nobody waits."""
        if self._inside:
            ids = self._tier.device.download(ids)
        self._tier.policy.hinted(layer, ids.numpy())
        self._host.hint(layer, self._below(layer, ids), scores)

    def _below(self, layer: int, ids: Tensor) -> Tensor:
        """ids with -1 for those on the device."""
        first, experts = layer * self._experts, range(self._experts)
        here = torch.tensor([self._tier.is_resident(first + e) for e in experts] + [False])
        return ids.masked_fill(here[ids], -1)  # id -1 is the last: no expert

    def _count(self, events: int) -> None:
        stats = self.stats
        if self._tier.decoding:
            stats.decode_events += events
            stats.decode_hits += events
            stats.decode_device_hits += events
        else:
            stats.prefill_events += events
            stats.prefill_hits += events


class ByTable:
    """One submitted layer whose experts are all on the device for good: nobody looks at its ids.

    What its result queues depends on nothing else: as long as a layer has the same `table` it may
    be repeated without asking.
    """

    def __init__(
        self, tier: DeviceTier, x: Tensor, ids: Tensor, weights: Tensor, table: Tensor
    ) -> None:
        self.table = table
        self._tier, self._given = tier, (x, ids, weights)

    def result(self) -> Tensor:
        """Queues the kernels: [T, D]; rows without an expert are 0."""
        x, ids, weights = self._given
        rows = x.new_zeros(*ids.shape, x.shape[1])
        self._tier.compute_routed(x, ids, self.table, rows.view(-1, x.shape[1]))
        return self._tier.combine(rows, weights)
