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
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moeinf.native import DeviceContext, DeviceSlots, HostLock, OutOfDeviceMemory
from moeinf.offload.layout import ExpertLayout
from moeinf.offload.policy.base import Policy
from moeinf.offload.residency import Residency
from moeinf.offload.slot_math import ExpertRunner, TorchFfn
from moeinf.offload.stats import StoreStats
from moeinf.offload.trace import Phase


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
    ) -> ExpertRunner:
        """The arithmetic over an arena of shape (slots, slot_bytes) at a device address."""
        ...

    def upload(self, x: Tensor) -> Tensor:
        """x on the device; the host's may be changed only after the next download."""
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
    ) -> None:
        """make_policy: for so many slots. host: the tier below; `lock` holds its slots.

        Raises OutOfDeviceMemory, after giving back what torch has cached and a second attempt.
        """
        self.device = device
        self._context, self._lock, self._layout = context, lock, layout
        self._cells, self._make_policy, self._reference = cells, make_policy, reference
        self._host, self.stats = host, stats
        self._flying: deque[tuple[int, list[int]]] = deque()  # (batch, cells pinned in the host)
        self._slots: DeviceSlots | None = None  # once `shrink` has failed
        self._pass: tuple[NDArray[np.int64], Phase] | None = None
        self.decoding = False
        try:
            self._build(slots)
        except device.out_of_memory:
            device.release()
            self._build(slots)

    def _build(self, slots: int) -> None:
        arena = DeviceSlots(self._context, self._lock, slots, self.device.stream)
        shape = (slots, arena.slot_bytes)
        self._math = self.device.math(self._layout, arena.address, shape, self._reference)
        self._slots = arena
        self._residency = Residency(slots, self._cells)
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
    def bus_is_idle(self) -> bool:
        """Whether there is an arena to copy to, and no copy on its way."""
        self._settle()
        return self._slots is not None and not self._flying

    def is_resident(self, cell: int) -> bool:
        return self._residency.has_slot(cell)

    def begin_pass(self, rows: NDArray[np.int64], phase: Phase) -> None:
        self._pass, self.decoding = (rows, phase), phase == "decode"
        self.policy.begin_pass(rows, phase)

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

    def finish(self) -> None:
        """Returns when everything queued has run. Raises DeviceError, also for a kernel's fault."""
        self._arena.finish()

    def bring(self, cells: Iterable[int]) -> list[int]:
        """Queues the copies of the first of these, as many as there is room for; which they are.

        All are in the host's memory and not here. None leaves for another of them. Raises
        DeviceError; then none of them is here.
        """
        self._settle()
        taken: list[int] = []
        try:
            for cell in cells:
                if not self._make_room():
                    break
                self._residency.assign(cell, pinned=False)
                taken.append(cell)
                self.policy.admitted(cell)
            if taken:
                self._copy(taken)
        except BaseException:
            for cell in taken:
                self.policy.victim(lambda other, cell=cell: other == cell)  # type: ignore[misc]
                self._residency.release(cell)
            raise
        for cell in taken:
            self._residency.loaded(cell)
        return taken

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
        self.end_copies()
        self.finish()
        self._slots, self._residency = None, Residency(1, self._cells)
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
        return True

    def close(self) -> None:
        """Ends the copies and gives the arena back."""
        try:
            self.end_copies()
        finally:
            self._slots = None
            del self._lock

    def _make_room(self) -> bool:
        if self._residency.free:
            return True
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
