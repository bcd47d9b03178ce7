"""What a replay has counted and timed, per decoded token and in all.

Does not know how it was replayed. With one tier nothing is said of a device: those counts stay 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field


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
    device_hits: int = 0  # of the hits, those in a device slot
    cpu_events: int = 0  # what the CPU computed where it lay
    copies: int = 0  # experts copied over the bus
    floor_seconds: float = 0.0


@dataclass
class Outcome:
    """Sums over decode passes; `tokens` has them one by one. Prefetch counts too are of decode."""

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
        """Of all events, those that were only in a host slot."""
        return self.hit_rate - self.device_hit_rate

    @property
    def cpu_share(self) -> float:
        """Of all events, those that the CPU computed."""
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
        """Decode time that the model gives the whole replay."""
        return self._sum("seconds")

    @property
    def prefetch_precision(self) -> float | None:
        """Share of reads ahead that were used before they left; None without reads ahead."""
        return self.used_ahead / self.fetched_ahead if self.fetched_ahead else None

    @property
    def prefetch_recall(self) -> float | None:
        """Share of what was not resident in time that had been read ahead."""
        needed = self.used_ahead + self.demand_reads
        return self.used_ahead / needed if self.fetched_ahead and needed else None
