"""Model time for the simulator: the compute time of a layer, and one link that reads experts.

docs/study.md justifies the model. No number here is measured on a machine.

Compute takes all bytes that a token reads, dense included, ÷ RAM bandwidth, spread evenly over
layers. A layer first takes its dense share, then routes. Then it computes each chosen expert when
it has arrived, resident experts first. Reads share one link of RAM bandwidth ÷ `ram_over_link`, one
after the other. A demand read goes before all waiting reads, and a started read is not interrupted.
tiered_replay.py adds the times of a device tier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from moeinf.offload.gpu_tier.miss_split import Contended
from moeinf.offload.routing.trace import RoutingShape

_UNKNOWN_EXPERT_BYTES = 1 << 20


@dataclass(frozen=True)
class TimeModel:
    """Bandwidths. ram_bytes_per_s scales every stall; only ram_over_link changes a comparison."""

    ram_over_link: float = 8.0
    ram_bytes_per_s: float = 30e9

    def sized(self, shape: RoutingShape) -> RoutingShape:
        """Return the shape; without sizes, experts get 1 MiB and dense weights 0 bytes."""
        if shape.expert_bytes:
            return shape
        return RoutingShape(
            shape.layers, shape.experts, shape.top_k, shape.encoder_layers, _UNKNOWN_EXPERT_BYTES
        )

    def dense_seconds(self, shape: RoutingShape) -> float:
        """Return the time for the dense weights of one layer."""
        return shape.dense_bytes / shape.layers / self.ram_bytes_per_s

    def expert_seconds(self, shape: RoutingShape) -> float:
        """Return the time to compute one resident expert."""
        return shape.expert_bytes / self.ram_bytes_per_s

    def read_seconds(self, shape: RoutingShape) -> float:
        """Return the time to read one expert over the link."""
        return shape.expert_bytes * self.ram_over_link / self.ram_bytes_per_s


@dataclass(frozen=True)
class DeviceSpeeds:
    """Bytes per second of experts: over the bus, by the CPU, by the device.

    Bus and CPU are measured while the other is busy. The device reads experts and dense weights
    from its own memory.
    """

    bus_bytes_per_s: float = 25e9
    cpu_bytes_per_s: float = 30e9
    device_bytes_per_s: float = 500e9

    @property
    def fetched_share(self) -> float:
        """The share of the misses that `auto` fetches over the bus."""
        return Contended(self.bus_bytes_per_s, self.cpu_bytes_per_s).fetched_share

    def floor_seconds(self, hit_bytes: float, missed_bytes: float) -> float:
        """Return the shortest possible time for one token's experts.

        The device computes the hits, while bus and CPU divide the misses so that both end together.
        """
        below = missed_bytes / (self.bus_bytes_per_s + self.cpu_bytes_per_s)
        return max(hit_bytes / self.device_bytes_per_s, below)


class Link:
    """Runs one read after the other; a waiting read starts only if the link was idle before now.

    start(cell) is called when a waiting read could begin. It takes a slot and returns True, or
    returns False.
    """

    def __init__(self, read_seconds: float, start: Callable[[int], bool]) -> None:
        self._read_seconds = read_seconds
        self._start = start
        self._waiting: deque[int] = deque()
        self._asked_at = 0.0
        self.free_at = 0.0
        self.arriving: dict[int, float] = {}  # cell -> time of arrival, in that order

    def wish(self, cells: Iterable[int], now: float) -> None:
        """Replace the waiting reads by these cells, in this order."""
        self._waiting = deque(cells)
        self._asked_at = now

    def run_until(self, now: float) -> None:
        """Start waiting reads whose turn comes before `now`."""
        while self._waiting:
            begin = max(self.free_at, self._asked_at)
            if begin >= now:
                return
            cell = self._waiting.popleft()
            if self._start(cell):
                self.free_at = begin + self._read_seconds
                self.arriving[cell] = self.free_at

    def arrived(self, now: float) -> list[int]:
        """Return the cells whose reads have ended by `now`, each once."""
        done = [cell for cell, time in self.arriving.items() if time <= now]
        for cell in done:
            del self.arriving[cell]
        return done

    def demand(self, now: float) -> float:
        """Start a read now, or when the running one ends; return the time of its end."""
        self.free_at = max(now, self.free_at) + self._read_seconds
        return self.free_at
