"""Model time for the simulator: the compute time of a layer, and one link that reads experts.

docs/study.md justifies the model. No number here is measured on a machine.

Compute takes all bytes that a token reads, dense included, ÷ RAM bandwidth, spread evenly over
layers. A layer first takes its dense share, then routes. Then it computes each chosen expert when
it has arrived, resident experts first. Reads share one link of RAM bandwidth ÷ `ram_over_link`, one
after the other. A demand read goes before all waiting reads. A started prefetch yields to it
between two pieces, as in the engine's queue (native/queue/copy_queue.h).
tiered_replay.py adds the times of a device tier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from math import ceil

from moeinf.offload.gpu_tier.miss_split import Contended
from moeinf.offload.routing.trace import RoutingShape
from moeinf.offload.store.prefetch_gate import Judge, Times
from moeinf.offload.store.transfer import PIECE_BYTES

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

    def piece_seconds(self) -> float:
        """Return the time to read one piece of a prefetch over the link."""
        return PIECE_BYTES * self.ram_over_link / self.ram_bytes_per_s

    def judge(self, shape: RoutingShape) -> Judge:
        """Return what weighs prefetches by these times; a layer computes its K experts."""
        read = self.read_seconds(shape)
        layer = self.dense_seconds(shape) + shape.top_k * self.expert_seconds(shape)
        piece = min(read, self.piece_seconds())
        times = Times(read, piece, layer, read / piece)
        return Judge(shape.layers, shape.experts, times)


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
    """Runs one read after the other, demand first.

    Demand is read in one go. A prefetch is read in pieces, and begins only while nothing else is
    read. Between two pieces it yields to demand, and goes on after it.

    start(cell) is called when a waiting read could begin. It takes a slot and returns True, or
    returns False. drop(cell) frees the slot of a half-read cell that is given up.
    """

    def __init__(
        self,
        read_seconds: float,
        piece_seconds: float,
        start: Callable[[int], bool],
        drop: Callable[[int], None],
    ) -> None:
        self._read_seconds, self._piece_seconds = read_seconds, piece_seconds
        self._start, self._drop = start, drop
        self._waiting: deque[int] = deque()
        self._asked_at = 0.0
        self._demand_end = 0.0
        self._ahead: int | None = None  # the last prefetch that has begun
        self._ahead_since, self._ahead_end = 0.0, 0.0  # when it began or goes on, and ends
        self.arriving: dict[int, float] = {}  # prefetches: cell -> time of arrival, in that order

    def prefetch(self, cells: Iterable[int], now: float) -> None:
        """Replace the waiting reads by these cells, in this order; drop a half-read other one."""
        self._waiting = deque(cells)
        self._asked_at = now
        half_read = now < self._ahead_since < self._ahead_end
        if half_read and self._ahead in self.arriving and self._ahead not in self._waiting:
            del self.arriving[self._ahead]
            self._drop(self._ahead)
            self._ahead_end = self._ahead_since

    def run_until(self, now: float) -> None:
        """Start waiting reads whose turn comes before `now`."""
        while self._waiting:
            begin = max(self._demand_end, self._ahead_end, self._asked_at)
            if begin >= now:
                return
            cell = self._waiting.popleft()
            if self._start(cell):
                self._ahead, self._ahead_since = cell, begin
                self._ahead_end = self.arriving[cell] = begin + self._read_seconds

    def arrived(self, now: float) -> list[int]:
        """Return the cells whose reads have ended by `now`, each once."""
        done = [cell for cell, time in self.arriving.items() if time <= now]
        for cell in done:
            del self.arriving[cell]
        return done

    def hasten(self, cells: Collection[int]) -> None:
        """Turn prefetches of these cells into demand, ahead of demand that comes now."""
        if self._ahead in self.arriving and self._ahead in cells:
            self._demand_end = max(self._demand_end, self._ahead_end)

    def demand(self, now: float) -> float:
        """Read now, after the demand before it and a running piece; return the time of its end."""
        begin, left = max(now, self._demand_end), self._ahead_end - self._ahead_since
        if self._ahead_end > begin:  # it is not over
            done = max(1, ceil((begin - self._ahead_since) / self._piece_seconds))
            stop = self._ahead_since + done * self._piece_seconds
            if self._ahead_since <= now:  # else it has yielded already
                begin = min(stop, self._ahead_end)
                left = self._ahead_end - begin
        end = self._demand_end = begin + self._read_seconds
        if self._ahead_end > begin:
            self._ahead_since, self._ahead_end = end, end + left
            if self._ahead in self.arriving:
                self.arriving[self._ahead] = self._ahead_end
        return end
