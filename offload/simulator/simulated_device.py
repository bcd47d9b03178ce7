"""Simulate the device's tier in a replay: device_slots.py without a device, with timed copies."""

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
    """The device tier above the host slots.

    share: share of the misses that `auto` fetches; None: computed from the speeds.
    """

    slots: int
    miss: Miss = "auto"
    speeds: DeviceSpeeds = field(default_factory=DeviceSpeeds)
    share: float | None = None


class ReplayedTier:
    """The experts in device slots, and the copies in flight on the bus."""

    def __init__(
        self, residency: Residency, policy: Policy, host: Residency, copy_seconds: float
    ) -> None:
        """Set the tiers: residency of the device, all empty, and of the host below.

        copy_seconds: time to copy one expert.
        """
        self.policy, self._host, self.copy_seconds = policy, host, copy_seconds
        self._residency = residency
        self.free_at = 0.0  # when the bus ends all queued copies
        self._there_at: dict[int, float] = {}  # when each cell's last copy ends
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
        """Return the time at which the bytes of all these resident cells have arrived."""
        return max((self._there_at[cell] for cell in cells), default=now)

    def bus_is_idle(self, now: float) -> bool:
        self._land(now)
        return not self._flying

    def on_their_way(self, now: float) -> int:
        self._land(now)
        return sum(len(cells) for _, cells in self._flying)

    def bring(self, cells: Iterable[int], now: float, busy: Collection[int] = ()) -> list[int]:
        """Copy the first of these cells that find room, in one batch; return them.

        A `busy` expert is evicted only if no other can be.
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
        """Land all copies and return the time at which the last ends; None: no copy in flight."""
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
