"""Count the events of an expert store, in the terms of docs/architecture.md ("Measurements").

Does not know requests or text. An *event* is one selected expert of one token in one layer. It is a
hit if the expert was resident when its layer requested it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal


@dataclass
class StoreStats:
    """Sums since the store was built; the difference of two describes the time between them."""

    decode_events: int = 0
    decode_hits: int = 0
    decode_events_low: int = 0  # lossy: of decode_events, computed with copies in fewer bits
    low_reads: int = 0  # reads of such copies; their bytes are in bytes_read, too
    low_bytes_read: int = 0
    low_bytes_spared: int = 0  # what those reads would have moved more for the experts themselves
    decode_events_skipped: int = 0  # lossy: absent and light, so not computed; not in decode_events
    decode_events_rerouted: int = 0  # lossy: of an expert that is not among the router's best
    prefill_events: int = 0
    prefill_hits: int = 0
    loads: int = 0  # experts read into a slot
    decode_loads: int = 0
    bytes_read: int = 0
    decode_bytes_read: int = 0
    stall_seconds: float = 0.0  # waiting for experts without work to compute
    decode_stall_seconds: float = 0.0
    decode_hits_hinted: int = 0  # first use of an expert that a gate's hint prefetched
    decode_hits_predicted: int = 0  # the same for lookahead and warm start; all others: cached
    ahead_bytes_read: int = 0  # before a layer asked
    ahead_bytes_used: int = 0  # the part that a layer requested later, also while in flight
    ahead_bytes_wasted: int = 0  # the part evicted unused; the remainder may still be used
    decode_policy_seconds: float = 0.0  # deciding what to load and evict, and its bookkeeping
    decode_device_hits: int = 0  # hits on an expert in a device slot
    decode_cpu_events: int = 0  # with a device: events that the CPU computed from host slots
    bus_bytes: int = 0  # copied from host to device slots
    decode_bus_bytes: int = 0

    def used(self, decoding: bool, events: int, hits: int) -> None:
        """Count a layer's routing: `hits` of its events were resident."""
        if decoding:
            self.decode_events += events
            self.decode_hits += hits
        else:
            self.prefill_events += events
            self.prefill_hits += hits

    def copy(self) -> StoreStats:
        return StoreStats(**self.__dict__)

    def since(self, before: StoreStats) -> StoreStats:
        return StoreStats(
            **{f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(self)}
        )

    def __iadd__(self, more: StoreStats) -> StoreStats:
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(more, f.name))
        return self

    def hit_ahead(self, cause: Literal["hinted", "predicted"], events: int) -> None:
        """Count decode events whose expert had been prefetched, and why."""
        if cause == "hinted":
            self.decode_hits_hinted += events
        else:
            self.decode_hits_predicted += events

    @property
    def hit_rate(self) -> float | None:
        """Share of decode events that were hits; None before the first."""
        return self.decode_hits / self.decode_events if self.decode_events else None

    @property
    def skipped_share(self) -> float | None:
        """Share of decode events that a lossy option dropped; None before the first."""
        events = self.decode_events + self.decode_events_skipped
        return self.decode_events_skipped / events if events else None

    @property
    def rerouted_share(self) -> float | None:
        """Share of decode events of experts that a lossy option chose; None before the first."""
        events = self.decode_events + self.decode_events_skipped
        return self.decode_events_rerouted / events if events else None

    @property
    def low_share(self) -> float | None:
        """Share of decode events computed with copies in fewer bits; None before the first."""
        return self.decode_events_low / self.decode_events if self.decode_events else None

    @property
    def decode_hits_cached(self) -> int:
        """Hits on experts that an earlier use had made resident."""
        return self.decode_hits - self.decode_hits_hinted - self.decode_hits_predicted

    @property
    def ahead_accuracy(self) -> float | None:
        """Used share of the prefetched bytes that were used or wasted; None without any."""
        used, wasted = self.ahead_bytes_used, max(0, self.ahead_bytes_wasted)
        return used / (used + wasted) if used + wasted else None
