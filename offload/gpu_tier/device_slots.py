"""The tier above host memory: which experts lie in device slots, and the copies that bring them.

Does not know routing's meaning, files, or how an expert is computed. Cells are layer · E + expert.

One cell's way up, and out again:

    host slot, pinned ──copy queued──▶ device slot: resident at once for whoever queues kernels,
         │                                  │       since they wait for the copy, on the device
         └──batch done: unpinned            └──evicted: a clean copy, so only the number moves; the
                                                 next copy into the slot waits for its last kernel

So a device slot needs no pin while kernels run, nor for a copy's sake; a host slot keeps one until
the copy has read it. Who leaves is decided by a policy of its own, which sees all
routing, with the Residency and the verbs of the host's tier.

Used by the engine's thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeinf.native import DeviceContext, DeviceSlots, HostLock, OutOfDeviceMemory
from moeinf.offload.format.layout import ExpertLayout
from moeinf.offload.policy.base import Policy
from moeinf.offload.routing.trace import Phase
from moeinf.offload.store.compute import ExpertRunner, TorchFfn
from moeinf.offload.store.residency import Residency
from moeinf.offload.store.stats import StoreStats

_UNASKED_BYTES = 64 << 20  # of one batch that nobody has asked for: some 3 ms of a bus
_LOOKED_AT = 256  # of those who may be absent, per pass: a few µs each


class RoutedRunner(ExpertRunner, Protocol):
    """Arithmetic that can find its experts by itself."""

    def can_route(self, rows: int) -> bool:
        """Whether run_routed gives so many rows what `run` would give them."""
        ...

    def run_routed(
        self, x: Tensor, ids: Tensor, table: Tensor, first_cell: int, rows: Tensor
    ) -> None:
        """Fills the rows of all pairs whose expert has a slot: ids [T, K] and the int32 table of
        slots, expert e at first_cell + e, lie on the device, and so do x and rows [T·K, D]."""
        ...


class Device(Protocol):
    """What computes on the device: torch, with kernels on a stream."""

    @property
    def stream(self) -> int:
        """The handle of the stream that everything below is queued to."""
        ...

    @property
    def out_of_memory(self) -> tuple[type[Exception], ...]:
        """What is raised when there is no memory left for a computation."""
        ...

    def math(
        self, layout: ExpertLayout, address: int, shape: tuple[int, int], reference: TorchFfn
    ) -> RoutedRunner:
        """The arithmetic over an arena of shape (slots, slot_bytes) at a device address."""
        ...

    def limit(self, size_bytes: int) -> None:
        """What torch may hold of the device's memory for this engine from now on, beside others'
        shares; more is out of memory. 0: the engine has ended."""
        ...

    def reserved_bytes(self) -> int:
        """What torch has taken of the device, used or not, for whomever."""
        ...

    def upload(self, x: Tensor) -> Tensor:
        """x on the device; the host's may be changed as soon as this returns."""
        ...

    def empty_rows(self, x: Tensor, count: int) -> Tensor:
        """[count, D] on the device for x [T, D] there; unspecified."""
        ...

    def download(self, rows: Tensor) -> Tensor:
        """rows in host memory, after everything that is queued has run."""
        ...

    def release(self) -> None:
        """Gives cached memory back to the device."""
        ...


class DeviceTier:
    """Slots in device memory above the host slots of one store."""

    def __init__(
        self,
        context: DeviceContext,
        lock: HostLock,
        device: Device,
        layout: ExpertLayout,
        slots: int,
        cells: int,
        make_policy: Callable[[int], Policy],
        reference: TorchFfn,
        host: Residency,
        stats: StoreStats,
        memory_bytes: int | None = None,
    ) -> None:
        """make_policy: for so many slots. host: the tier below; `lock` holds its slots.
        memory_bytes: of the arena and of all that torch holds; None: nobody counts.

        Raises OutOfDeviceMemory, after giving back what torch has cached and a second attempt.
        """
        self.device = device
        self._context, self._lock, self._layout = context, lock, layout
        self.cells, self._make_policy, self._reference = cells, make_policy, reference
        self._host, self.stats, self._memory_bytes = host, stats, memory_bytes
        self._tables: dict[int, Tensor] = {}  # by first cell, of layers that nobody can leave
        self._flying: deque[tuple[int, list[int]]] = deque()  # (batch, cells pinned in the host)
        self._slots: DeviceSlots | None = None  # once `shrink` has failed
        self._pass: tuple[NDArray[np.int64], Phase] | None = None
        self.decoding = False
        for attempt in range(2):
            try:
                self._build(slots)
                break
            except device.out_of_memory:
                if attempt:
                    raise
            device.release()  # here nothing holds a first arena any more

    def _build(self, slots: int) -> None:
        arena = DeviceSlots(self._context, self._lock, slots, self.device.stream)
        shape = (slots, arena.slot_bytes)
        if self._memory_bytes is not None:
            self.device.limit(self._memory_bytes - slots * arena.slot_bytes)
        self._math = self.device.math(self._layout, arena.address, shape, self._reference)
        self._slots = arena
        self._residency = Residency(slots, self.cells)
        self._absent = deque(range(self.cells if self.all_fit else 0))  # maybe; see bring_absent
        self.policy = self._make_policy(slots)

    @property
    def _arena(self) -> DeviceSlots:
        if self._slots is None:
            raise OutOfDeviceMemory("the device's slots were given up for want of memory")
        return self._slots

    @property
    def slots(self) -> int:
        return self._residency.slots

    @property
    def resident(self) -> int:
        return self._residency.resident

    @property
    def all_fit(self) -> bool:
        """Whether nobody will ever leave."""
        return self._residency.all_fit

    @property
    def lost(self) -> bool:
        """Whether the last slot was given up, and another could not be had."""
        return self._slots is None

    def can_route(self, rows: int) -> bool:
        """Whether `compute_routed` is right for so many rows."""
        return self._math.can_route(rows)

    @property
    def lacks_somebody(self) -> bool:
        """Whether everybody fits, and somebody may not be here yet."""
        return bool(self._absent)

    @property
    def bus_is_idle(self) -> bool:
        """Whether there is an arena to copy to, and no copy on its way."""
        self._settle()
        return self._slots is not None and not self._flying

    @property
    def on_their_way(self) -> int:
        """Experts whose copies have not ended, for all that is known."""
        self._settle()
        return sum(len(cells) for _, cells in self._flying)

    def is_resident(self, cell: int) -> bool:
        return self._residency.has_slot(cell)

    def begin_pass(self, rows: NDArray[np.int64], phase: Phase) -> None:
        self._pass, self.decoding = (rows, phase), phase == "decode"
        self.policy.begin_pass(rows, phase)

    def end_pass(self, accepted: NDArray[np.bool_] | None) -> None:
        self._pass = None
        self.policy.end_pass(accepted)

    def compute(
        self,
        x: Tensor,
        experts: Sequence[tuple[int, list[int]]],  # (resident cell, places)
        top_k: int,
        rows: Tensor,
    ) -> None:
        """Queues the rows of resident cells; x and rows are on the device."""
        slots = [self._residency.slot_of(cell) for cell, _ in experts]
        self._arena.begin_read(slots)
        try:
            pairs = [(slot, places) for slot, (_, places) in zip(slots, experts, strict=True)]
            self._math.run(x, pairs, top_k, rows)
        finally:
            self._arena.end_read(slots)

    def table(self, first: int, experts: int) -> Tensor | None:
        """The slots of a layer's cells, int32 on the device, once all of them are here for good.

        None before that, and always where not everybody has a slot.
        """
        if not self.all_fit:
            return None
        found = self._tables.get(first)
        cells = range(first, first + experts)
        if found is None and self._residency.are_resident(cells):
            slots = [self._residency.slot_of(cell) for cell in cells]
            self._arena.begin_read(slots)  # the only time: nobody will be copied over them
            found = self.device.upload(torch.tensor(slots, dtype=torch.int32))
            self._tables[first] = found
        return found

    def compute_routed(self, x: Tensor, ids: Tensor, table: Tensor, rows: Tensor) -> None:
        """Queues a layer of which `table` has everybody. ids [T, K] are not looked at here."""
        self._math.run_routed(x, ids, table, 0, rows)

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Queues the sum over K: rows [T, K, D] and weights [T, K] on the device -> [T, D]."""
        return self._math.combine(rows, weights)

    def read(self, x: Tensor) -> Tensor:
        """x in host memory, after everything queued has run. Raises DeviceError."""
        self.finish()
        return self.device.download(x)

    def finish(self) -> None:
        """Returns when everything queued has run. Raises DeviceError, also for a kernel's fault."""
        self._arena.finish()

    def bring(self, cells: Iterable[int], busy: Collection[int] = ()) -> list[int]:
        """Queues the copies of the first of these, as many as there is room for; which they are.

        All are in the host's memory and not here. None leaves for another of them, and who is
        `busy` only if nobody else can: the copy would wait for its kernels. Raises DeviceError;
        then none of them is here.
        """
        self._settle()
        taken: list[int] = []
        try:
            for cell in cells:
                if not self._make_room(busy):
                    break
                self._residency.assign(cell, pinned=False)
                taken.append(cell)
                self.policy.admitted(cell)
            if taken:
                self._copy(taken)
        except BaseException:
            self.policy.forget(taken)
            for cell in taken:
                self._residency.release(cell)
            raise
        for cell in taken:
            self._residency.loaded(cell)
        return taken

    def bring_absent(self) -> None:
        """Where everybody fits: copies some that nobody has asked for, while the bus is idle."""
        if not self.bus_is_idle:
            return
        most, ready = max(1, _UNASKED_BYTES // self._layout.data_bytes), list[int]()
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
        """Waits until no copy reads a host slot. False: none did."""
        if not self._flying:
            return False
        batch = self._flying[-1][0]
        try:
            self._arena.wait(batch)
        finally:  # of a device that has failed nothing reads the host either
            self._land(batch)
        return True

    def shrink(self) -> bool:
        """Evicts everybody and goes on with half the slots, or less. False: there is but one slot.

        For when a computation finds no memory: the arena is the only thing that can become less.
        Raises OutOfDeviceMemory when others took even that; then nobody is here ever after.
        """
        slots = self._residency.slots // 2
        if slots == 0:
            return False
        self._rebuild(slots)
        return True

    def give_up(self, size_bytes: int, of_slots_bytes: int) -> bool:
        """Goes on with so much less memory, for good: torch's part of it at once, and that of slots
        by evicting everybody. False: not even a slot would be left, and nothing is given up. Raises
        like `shrink`."""
        slots = self._residency.slots - -(-of_slots_bytes // self._arena.slot_bytes)
        if slots < 1:
            return False
        if self._memory_bytes is not None:
            self._memory_bytes -= size_bytes
            self.device.limit(self._memory_bytes - self._residency.slots * self._arena.slot_bytes)
        if of_slots_bytes:
            self._rebuild(slots)
        return True

    def _rebuild(self, slots: int) -> None:
        """With so many slots, or half of them while there is no memory."""
        self.end_copies()
        self.finish()
        self._slots, self._residency = None, Residency(1, self.cells)
        self._tables.clear()
        del self._math  # the arena goes before its successor is allocated
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
        """Ends the copies and gives the arena back."""
        try:
            self.end_copies()
        finally:
            self._slots = None
            del self._lock

    def _make_room(self, busy: Collection[int]) -> bool:
        if self._residency.free:
            return True
        victim = self.policy.victim(self._residency.idle(busy))
        if victim is None and busy:
            victim = self.policy.victim(self._residency.can_evict)
        if victim is None:
            return False
        self._residency.evict(victim)
        return True

    def _copy(self, cells: list[int]) -> None:
        host = [self._host.slot_of(cell) for cell in cells]
        slots = [self._residency.slot_of(cell) for cell in cells]
        batch = self._arena.copy(host, slots, self._layout.data_bytes)
        for cell in cells:
            self._host.pin(cell)
        self._flying.append((batch, cells))
        size = len(cells) * self._layout.data_bytes
        self.stats.bus_bytes += size
        if self.decoding:
            self.stats.decode_bus_bytes += size

    def _settle(self) -> None:
        """Unpins the host slots of copies that have arrived."""
        while self._flying and self._arena.done(self._flying[0][0]):
            self._land(self._flying[0][0])

    def _land(self, batch: int) -> None:
        while self._flying and self._flying[0][0] <= batch:
            for cell in self._flying.popleft()[1]:
                self._host.unpin(cell)
