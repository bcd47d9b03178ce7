"""Hold the counts and times of a replay, per decoded token and in total.

With one tier the device's counts stay 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moeinf.offload.routing.trace import Recording


@dataclass
class Token:
    """One decode pass of a replay."""

    request: int
    age: int  # decode passes of this request before it
    events: int = 0
    hits: int = 0  # in any memory
    reads: int = 0
    insertions: int = 0
    stall_seconds: float = 0.0
    seconds: float = 0.0
    device_hits: int = 0  # hits in a device slot
    cpu_events: int = 0  # events that the CPU computed from host slots
    copies: int = 0  # experts copied over the bus
    floor_seconds: float = 0.0


@dataclass
class Outcome:
    """Sums over decode passes, prefetches included; `tokens` has the single passes."""

    expert_bytes: int
    tokens: list[Token] = field(default_factory=list)
    rows: int = 0  # decode tokens; more than passes when requests are batched
    fetched_ahead: int = 0
    used_ahead: int = 0
    demand_reads: int = 0

    def _sum(self, name: str) -> float:
        return float(sum(getattr(token, name) for token in self.tokens))

    @property
    def hit_rate(self) -> float:
        return self._sum("hits") / max(1.0, self._sum("events"))

    @property
    def reads_per_token(self) -> float:
        return self._sum("reads") / max(1, self.rows)

    @property
    def bytes_read_per_token(self) -> float:
        return self.reads_per_token * self.expert_bytes

    @property
    def insertions_per_token(self) -> float:
        return self._sum("insertions") / max(1, self.rows)

    @property
    def device_hit_rate(self) -> float:
        return self._sum("device_hits") / max(1.0, self._sum("events"))

    @property
    def host_hit_rate(self) -> float:
        """Share of events whose expert was only in a host slot."""
        return self.hit_rate - self.device_hit_rate

    @property
    def cpu_share(self) -> float:
        """Share of events that the CPU computed."""
        return self._sum("cpu_events") / max(1.0, self._sum("events"))

    @property
    def bus_bytes_per_token(self) -> float:
        return self._sum("copies") * self.expert_bytes / max(1, self.rows)

    @property
    def floor_ms_per_token(self) -> float:
        return 1000 * self._sum("floor_seconds") / max(1, self.rows)

    @property
    def ms_per_token(self) -> float:
        return 1000 * self.seconds / max(1, self.rows)

    @property
    def stall_ms_per_token(self) -> float:
        return 1000 * self._sum("stall_seconds") / max(1, self.rows)

    @property
    def seconds(self) -> float:
        """Decode time of the whole replay, in the time model."""
        return self._sum("seconds")

    @property
    def prefetch_precision(self) -> float | None:
        """Share of prefetches that were used before eviction; None without prefetches."""
        return self.used_ahead / self.fetched_ahead if self.fetched_ahead else None

    @property
    def prefetch_recall(self) -> float | None:
        """Prefetched and used ÷ (that + demand reads); None without prefetches."""
        needed = self.used_ahead + self.demand_reads
        return self.used_ahead / needed if self.fetched_ahead and needed else None

    def document(self) -> dict[str, Any]:
        """Return the figures of one tier (docs/schemas/simulate.json)."""
        return {
            "hit_rate": round(self.hit_rate, 5),
            "reads_per_token": round(self.reads_per_token, 3),
            "bytes_read_per_token": round(self.bytes_read_per_token),
            "insertions_per_token": round(self.insertions_per_token, 3),
            "stall_ms_per_token": self.stall_ms_per_token,
            "prefetch_precision": self.prefetch_precision,
            "prefetch_recall": self.prefetch_recall,
        }


def recording_document(recording: Recording, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the document of a recording with the results of its replays."""
    shape = recording.shape
    return {
        "name": recording.name,
        "layers": shape.layers,
        "experts": shape.experts,
        "top_k": shape.top_k,
        "tokens": recording.decode_tokens,
        "lru_cliff_capacity": shape.layers * shape.top_k / (shape.layers * shape.experts),
        "results": results,
    }
