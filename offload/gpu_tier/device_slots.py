"""The tier above host memory: the experts in device slots, and the copies that bring them.

Cells are layer · E + expert. One cell's way up, and out again:

    host slot, pinned ──copy queued──▶ device slot: resident at once for any caller that queues
         │                                  │       kernels: they wait for the copy on the device
         └──batch done: unpinned            └──evicted: a clean copy, so only the number moves; the
                                                 next copy into the slot waits for its last kernel

So a device slot needs no pin while kernels or copies run. A host slot stays pinned until the copy
has read it. The tier's own policy, which sees all routing, decides which cell leaves.

Only the engine's thread uses it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeinf.native import DeviceContext, DeviceSlots, HostLock, OutOfDeviceMemory
from moeinf.offload.gpu_tier.arithmetic import Device
from moeinf.offload.gpu_tier.page_lock import PageLocking
from moeinf.offload.policy.base import Policy
from moeinf.offload.routing.trace import Phase
from moeinf.offload.store.compute import TorchFfn, by_math
from moeinf.offload.store.host_tier import HostTier
from moeinf.offload.store.residency import Residency
from moeinf.offload.store.tier import Experts

_UNASKED_BYTES = 256 << 20  # of one batch without demand: most models' layers, 10 ms of a bus
_LOOKED_AT = 256  # of the possibly absent cells, per pass: a few µs each


class DeviceTier:
    """Slots in device memory above the host's tier."""

    policy: Policy

    def __init__(
        self,
        context: DeviceContext,
        lock: HostLock,
        device: Device,
        slots: int,
        make_policy: Callable[[int], Policy],
        reference: TorchFfn,
        host: HostTier,
        *,
        memory_bytes: int | None = None,
        inside: bool = False,
        lock_pages: Callable[[], PageLocking] | None = None,
    ) -> None:
        """Allocate the arena.

        make_policy: makes a policy for a number of slots. host: the tier below; `lock` holds its
        slots, and lock_pages begins to lock them. memory_bytes: of the arena and of all that torch
        holds; None: unlimited. inside: whether the inputs of a layer are on the device.

        Raises OutOfDeviceMemory, after giving back what torch has cached and a second attempt.
        """
        self.device, self.inside, self.stats = device, inside, host.stats
        self._context, self._lock = context, lock
        self._make_policy, self._reference = make_policy, reference
        self._below, self._host, self._memory_bytes = host, host.table, memory_bytes
        self._tables: dict[int, Tensor] = {}  # by first cell, of layers that no cell can leave
        self._flying: deque[tuple[int, list[int]]] = deque()  # (batch, cells pinned in the host)
        self._slots: DeviceSlots | None = None  # None once `shrink` has failed
        self._pass: tuple[NDArray[np.int64], Phase] | None = None
        self._uncounted: list[Tensor] = []  # routing on the device, of this pass
        self.decoding = False
        for attempt in range(2):
            try:
                self._build(slots)
                break
            except device.out_of_memory:
                if attempt:
                    raise
            device.release()  # here nothing holds a first arena any more
        self._planned = self.slots
        self._locking = None if lock_pages is None else lock_pages()

    def _build(self, slots: int) -> None:
        arena = DeviceSlots(self._context, self._lock, slots, self.device.stream)
        shape = (slots, arena.slot_bytes)
        if self._memory_bytes is not None:
            self.device.limit(self._memory_bytes - slots * arena.slot_bytes)
        layouts, reference = self._below.layouts, self._reference
        maths = {x: self.device.math(x, arena.address, shape, reference) for x in {*layouts}}
        self._math = [maths[layout] for layout in layouts]  # by cell
        each = self._below.experts
        self._alike = [len({*layouts[n : n + each]}) == 1 for n in range(0, len(layouts), each)]
        self._slots = arena
        self.table = Residency(slots, self._host.cells)
        self._absent = deque(range(self._host.cells if self.all_fit else 0))  # may be absent
        self.policy = self._make_policy(slots)

    @property
    def _arena(self) -> DeviceSlots:
        if self._slots is None:
            raise OutOfDeviceMemory("the device has no slots left: it ran out of memory before")
        return self._slots

    @property
    def slots(self) -> int:
        return self.table.slots

    @property
    def count(self) -> int:
        return self.table.count

    @property
    def all_fit(self) -> bool:
        """True if all experts fit, so that none ever has to leave."""
        return self.table.all_fit

    @property
    def complete(self) -> bool:
        """True if all experts have arrived and stay resident."""
        return self.all_fit and not self._absent

    @property
    def wants_all(self) -> bool:
        """True if it accepts experts that no layer requested."""
        return self.inside and self.all_fit

    @property
    def lost(self) -> bool:
        """True if the last slot was given up, and no new one could be allocated."""
        return self._slots is None

    @property
    def note(self) -> str | None:
        """The slots not page-locked or given up, and why; None: no problem so far."""
        if self.slots < self._planned:
            words = f"the GPU ran out of memory: it holds {self.slots} experts now, "
            advice = "use a smaller --ctx, or free the device memory of other programs"
            return words + f"not {self._planned}; {advice}"
        return None if self._locking is None else self._locking.note

    def can_route(self, layer: int, rows: int) -> bool:
        """Return whether `compute_routed` is correct: for so many rows, and for one layout."""
        return self._alike[layer] and self._math[layer * self._below.experts].can_route(rows)

    @property
    def bus_is_idle(self) -> bool:
        """True if there is an arena to copy to, and no copy in flight."""
        self._settle()
        return self._slots is not None and not self._flying

    @property
    def on_their_way(self) -> int:
        """Experts whose copies are in flight, or not yet known to have ended."""
        self._settle()
        return sum(len(cells) for _, cells in self._flying)

    def is_resident(self, cell: int) -> bool:
        return self.table.has_slot(cell)

    def resident(self, cells: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        return self.table.resident(cells)

    def begin_pass(self, rows: NDArray[np.int64], phase: Phase) -> None:
        self._pass, self.decoding = (rows, phase), phase == "decode"
        self.policy.begin_pass(rows, phase)

    def end_pass(self, accepted: NDArray[np.bool_] | None) -> None:
        self._pass = None
        routed, self._uncounted = self._uncounted, []
        try:
            if self.inside and accepted is None:  # else it broke off: nothing new may fail
                if routed:
                    self.count_hits(int((self.read(torch.cat(routed))[0] >= 0).sum()))
                if self._absent:
                    self._below.settle()
                    self.bring_absent()
        finally:
            self.policy.end_pass(accepted)

    def count_hits(self, events: int) -> None:
        """Count that many ids of a layer as hits here."""
        stats = self.stats
        if self.decoding:
            stats.decode_events += events
            stats.decode_hits += events
            stats.decode_device_hits += events
        else:
            stats.prefill_events += events
            stats.prefill_hits += events

    def count_at_end(self, ids: Tensor) -> None:
        """Count ids on the device, all of which are resident, when the pass ends."""
        self._uncounted.append(ids.flatten())

    def compute(self, x: Tensor, experts: Experts, top_k: int, rows: Tensor) -> None:
        """Queue the rows of resident cells of one layer; x and rows are on the device."""
        slots = [self.table.slot_of(cell) for cell, _ in experts]
        self._arena.begin_read(slots)
        try:
            for math, alike in by_math(experts, self._math):
                pairs = [(self.table.slot_of(cell), places) for cell, places in alike]
                math.run(x, pairs, top_k, rows)
        finally:
            self._arena.end_read(slots)

    def slot_table(self, first: int, experts: int) -> Tensor | None:
        """Return the slots of a layer's cells, int32 on the device, once all stay resident.

        None before that, and always if not all experts fit.
        """
        if not self.all_fit:
            return None
        found = self._tables.get(first)
        cells = range(first, first + experts)
        if found is None and self.table.are_resident(cells):
            slots = [self.table.slot_of(cell) for cell in cells]
            self._arena.begin_read(slots)  # only once: nothing will be copied over them
            (found,) = self.device.upload(torch.tensor(slots, dtype=torch.int32))
            self._tables[first] = found
        return found

    def compute_routed(
        self, layer: int, x: Tensor, ids: Tensor, table: Tensor, rows: Tensor
    ) -> None:
        """Queue a layer whose experts are all in `table`. ids [T, K] are not read here."""
        self._math[layer * self._below.experts].run_routed(x, ids, table, 0, rows)

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Queue the sum over K: rows [T, K, D] and weights [T, K] on the device -> [T, D]."""
        return self._math[0].combine(rows, weights)

    def read(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """Return xs in host memory, after everything queued has run. Raises DeviceError."""
        found = self.device.download(*xs)
        self.finish()
        return found

    def finish(self) -> None:
        """Wait until everything queued has run. Raises DeviceError, also for a kernel's fault."""
        self._arena.finish()

    def bring(self, cells: Iterable[int], busy: Collection[int] = ()) -> list[int]:
        """Queue the copies of the first of these, up to the free room; return which.

        All are in host memory and not here. None is evicted for another of them. A `busy` cell is
        evicted only if no other can be, because the copy would wait for its kernels. Raises
        DeviceError; then none of them is here.
        """
        self._settle()
        taken: list[int] = []
        try:
            for cell in cells:
                if not self.table.free and self.evict(busy) is None:
                    break
                self.table.assign(cell, pinned=False)
                taken.append(cell)
                self.policy.admitted(cell)
            if taken:
                self._copy(taken)
        except BaseException:
            self.forget(taken)
            raise
        for cell in taken:
            self.table.loaded(cell)
        return taken

    def evict(self, busy: Collection[int] = ()) -> int | None:
        """Evict the policy's victim, a `busy` cell last, and return it; None: no cell may leave."""
        victim = self.policy.victim(self.table.idle(busy))
        if victim is None and busy:
            victim = self.policy.victim(self.table.can_evict)
        if victim is not None:
            self.table.evict(victim)
        return victim

    def forget(self, cells: Iterable[int]) -> None:
        """Free the slots of cells whose copies were not queued."""
        gone = list(cells)
        self.policy.forget(gone)
        for cell in gone:
            self.table.release(cell)

    def bring_absent(self) -> None:
        """Copy up experts without demand, layer by layer, where all fit and the bus is idle."""
        if not self.bus_is_idle:
            return
        largest = max(layout.data_bytes for layout in self._below.layouts)
        most, ready = max(1, _UNASKED_BYTES // largest), list[int]()
        for _ in range(min(_LOOKED_AT, len(self._absent))):
            if len(ready) == most:
                break
            cell = self._absent.popleft()
            if self.is_resident(cell):
                continue
            if self._host.is_resident(cell):
                ready.append(cell)
            else:
                self._absent.append(cell)
        if ready:
            self.bring(ready)

    def end_copies(self) -> bool:
        """Wait until no copy reads a host slot. False: no copy did."""
        if not self._flying:
            return False
        batch = self._flying[-1][0]
        try:
            self._arena.wait(batch)
        finally:  # after a device failure nothing reads the host either
            self._land(batch)
        return True

    def shrink(self) -> bool:
        """Evict all experts and continue with at most half the slots. False: only one slot.

        Called when a computation is out of memory: only the arena can shrink. Raises
        OutOfDeviceMemory when no slot can be allocated; then the tier stays empty.
        """
        slots = self.table.slots // 2
        if slots == 0:
            return False
        self._rebuild(slots)
        return True

    def give_up(self, size_bytes: int, of_slots_bytes: int) -> int | None:
        """Release memory permanently; return the number of slots that this took, or None.

        Torch's part of size_bytes is released at once, that of slots by evicting all experts.
        None: no slot would be left, and nothing is released. Raises like `shrink`.
        """
        before = self.table.slots
        slots = before - -(-of_slots_bytes // self._arena.slot_bytes)
        if slots < 1:
            return None
        if self._memory_bytes is not None:
            self._memory_bytes -= size_bytes
            self.device.limit(self._memory_bytes - before * self._arena.slot_bytes)
        if of_slots_bytes:
            self._rebuild(slots)
        self._planned -= before - self.slots
        return before - self.slots

    def _rebuild(self, slots: int) -> None:
        """Rebuild the tier with that many slots, halved while out of memory."""
        self.end_copies()
        self.finish()
        self._slots, self.table = None, Residency(1, self._host.cells)
        self._tables.clear()
        del self._math  # free the arena before its successor is allocated
        self.device.release()
        while True:
            try:
                self._build(slots)
                break
            except self.device.out_of_memory:
                slots //= 2
                if slots == 0:
                    raise
        if self._pass is not None:
            self.policy.begin_pass(*self._pass)

    def close(self) -> None:
        """End the locking and the copies, and give the arena back."""
        if self._locking is not None:
            self._locking.close()
        try:
            self.end_copies()
        finally:
            self._slots = None
            del self._lock

    def _copy(self, cells: list[int]) -> None:
        host = [self._host.slot_of(cell) for cell in cells]
        slots = [self.table.slot_of(cell) for cell in cells]
        each = max(self._below.layouts[cell].data_bytes for cell in cells)
        batch = self._arena.copy(host, slots, each)
        for cell in cells:
            self._host.pin(cell)
        self._flying.append((batch, cells))
        size = len(cells) * each
        self.stats.bus_bytes += size
        if self.decoding:
            self.stats.decode_bus_bytes += size

    def _settle(self) -> None:
        """Unpin the host slots of copies that have arrived."""
        while self._flying and self._arena.done(self._flying[0][0]):
            self._land(self._flying[0][0])

    def _land(self, batch: int) -> None:
        while self._flying and self._flying[0][0] <= batch:
            for cell in self._flying.popleft()[1]:
                self._host.unpin(cell)
