"""The simulator's clock: what a layer takes to compute, and one link that reads experts.

Does not know policies. docs/study.md argues the model; nothing here is measured on a machine.

Compute: all bytes that a token reads, dense included, ÷ RAM bandwidth, spread evenly over layers:
a layer first takes its dense share, then routes, then takes each chosen expert's share as the
expert is there, those that are resident first. Reads share one link of RAM bandwidth ÷
`ram_over_link`, one after the other. Demand goes before everything that waits; a read that has
begun ends. What a device tier adds is said in tiered_replay.py.
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
    """ram_bytes_per_s sets the unit of every stall; only ram_over_link changes a comparison."""

    ram_over_link: float = 8.0
    ram_bytes_per_s: float = 30e9

    def sized(self, shape: RoutingShape) -> RoutingShape:
        """The shape with sizes; one that has none gets experts of 1 MiB and no dense bytes."""
        if shape.expert_bytes:
            return shape
        return RoutingShape(
            shape.layers, shape.experts, shape.top_k, shape.encoder_layers, _UNKNOWN_EXPERT_BYTES
        )

    def dense_seconds(self, shape: RoutingShape) -> float:
        """Of one layer."""
        return shape.dense_bytes / shape.layers / self.ram_bytes_per_s

    def expert_seconds(self, shape: RoutingShape) -> float:
        """To compute one expert that is resident."""
        return shape.expert_bytes / self.ram_bytes_per_s

    def read_seconds(self, shape: RoutingShape) -> float:
        """To read one expert over the link."""
        return shape.expert_bytes * self.ram_over_link / self.ram_bytes_per_s


@dataclass(frozen=True)
class DeviceSpeeds:
    """Bytes per second of experts: over the bus and by the CPU, each beside the other, and by the
    device from its own memory, which also reads the dense weights."""

    bus_bytes_per_s: float = 25e9
    cpu_bytes_per_s: float = 30e9
    device_bytes_per_s: float = 500e9

    @property
    def fetched_share(self) -> float:
        """Of the misses that `auto` divides."""
        return Contended(self.bus_bytes_per_s, self.cpu_bytes_per_s).fetched_share

    def floor_seconds(self, hit_bytes: float, missed_bytes: float) -> float:
        """Of one token's experts: the device computes the hits while bus and CPU, which divide the
        misses in the best way, both work to the end."""
        below = missed_bytes / (self.bus_bytes_per_s + self.cpu_bytes_per_s)
        return max(hit_bytes / self.device_bytes_per_s, below)


class Link:
    """One read after the other; waiting ones are started only while time is left for them.

    start(cell) -> bool is asked when a waiting read could begin: it takes a slot, or declines.
    """

    def __init__(self, read_seconds: float, start: Callable[[int], bool]) -> None:
        self._read_seconds = read_seconds
        self._start = start
        self._waiting: deque[int] = deque()
        self._asked_at = 0.0
        self.free_at = 0.0
        self.arriving: dict[int, float] = {}  # cell -> when it will be there, in that order

    def wish(self, cells: Iterable[int], now: float) -> None:
        """These wait from now on, in this order, instead of those that waited before."""
        self._waiting = deque(cells)
        self._asked_at = now

    def run_until(self, now: float) -> None:
        """Begins waiting reads whose turn comes before `now`."""
        while self._waiting:
            begin = max(self.free_at, self._asked_at)
            if begin >= now:
                return
            cell = self._waiting.popleft()
            if self._start(cell):
                self.free_at = begin + self._read_seconds
                self.arriving[cell] = self.free_at

    def arrived(self, now: float) -> list[int]:
        """Cells whose reads have ended by `now`; each is told once."""
        done = [cell for cell, time in self.arriving.items() if time <= now]
        for cell in done:
            del self.arriving[cell]
        return done

    def demand(self, now: float) -> float:
        """Begins a read at once, or when the running one ends; returns when it ends."""
        self.free_at = max(now, self.free_at) + self._read_seconds
        return self.free_at
