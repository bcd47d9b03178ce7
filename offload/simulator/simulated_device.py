"""The device's tier in a replay: device_slots.py without a device, its copies taking time.

Does not know routing, nor who computes what.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from moeinf.offload.gpu_tier.miss_split import Miss
from moeinf.offload.policy.base import Policy
from moeinf.offload.simulator.clock import DeviceSpeeds
from moeinf.offload.store.residency import Residency


@dataclass(frozen=True)
class Above:
    """What stands above the host slots. share: of the misses that `auto` fetches; None: that of the
    speeds."""

    slots: int
    miss: Miss = "auto"
    speeds: DeviceSpeeds = field(default_factory=DeviceSpeeds)
    share: float | None = None


class ReplayedTier:
    """Who is in device slots, and which copies are on the bus."""

    def __init__(
        self, residency: Residency, policy: Policy, host: Residency, copy_seconds: float
    ) -> None:
        """residency: of the device, all empty. host: the tier below. copy_seconds: of an expert."""
        self.policy, self._host, self.copy_seconds = policy, host, copy_seconds
        self._residency = residency
        self.free_at = 0.0  # the bus, of all that is queued
        self._there_at: dict[int, float] = {}  # per cell that was ever copied: the last time
        self._flying: deque[tuple[float, list[int]]] = deque()  # (end, cells pinned in the host)

    @property
    def slots(self) -> int:
        return self._residency.slots

    @property
    def all_fit(self) -> bool:
        return self._residency.all_fit

    def has(self, cell: int) -> bool:
        return self._residency.has_slot(cell)

    def there_at(self, cells: Iterable[int], now: float) -> float:
        """When the bytes of cells that it has are all there."""
        return max((self._there_at[cell] for cell in cells), default=now)

    def bus_is_idle(self, now: float) -> bool:
        self._land(now)
        return not self._flying

    def on_their_way(self, now: float) -> int:
        self._land(now)
        return sum(len(cells) for _, cells in self._flying)

    def bring(self, cells: Iterable[int], now: float, busy: Collection[int] = ()) -> list[int]:
        """Copies the first of these, as many as there is room for, in one batch; which they are.

        Who is `busy` leaves only if nobody else can.
        """
        self._land(now)
        taken: list[int] = []
        for cell in cells:
            if not self._make_room(busy):
                break
            self._residency.assign(cell, pinned=False)
            taken.append(cell)
            self.policy.admitted(cell)
        if taken:
            self.free_at = max(self.free_at, now) + len(taken) * self.copy_seconds
            for cell in taken:
                self._host.pin(cell)
                self._residency.loaded(cell)
                self._there_at[cell] = self.free_at
            self._flying.append((self.free_at, taken))
        return taken

    def end_copies(self) -> float | None:
        """When the last of them ends, after which none reads the host. None: none does."""
        if not self._flying:
            return None
        self._land(self.free_at)
        return self.free_at

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

    def _land(self, now: float) -> None:
        while self._flying and self._flying[0][0] <= now:
            for cell in self._flying.popleft()[1]:
                self._host.unpin(cell)
