"""Divide a layer's device misses between fetching over the bus and computing on the CPU.

The speed of both sides is that of reading an expert's bytes while the other side is busy. The bus
may have other copies in flight first. The number of fetched misses is the one with which the later
side ends soonest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from msgspec import Meta

Miss = Literal["auto", "compute", "fetch"]
MISSES: tuple[Miss, ...] = get_args(Miss)
BytesPerSecond = Annotated[float, Meta(gt=0)]
FEW_ROWS = 16  # rows of one expert: the CPU's time grows with them, the bus's does not


@dataclass(frozen=True)
class Contended:
    """Bytes per second of experts, both measured while the other was busy."""

    bus_bytes_per_s: BytesPerSecond
    cpu_bytes_per_s: BytesPerSecond

    @property
    def fetched_share(self) -> float:
        """The share of the missed bytes that the bus fetches, 0 … 1."""
        return self.bus_bytes_per_s / (self.bus_bytes_per_s + self.cpu_bytes_per_s)


class Split:
    """Divides a layer's misses. share: the bus's part, 0 … 1, if both sides end together."""

    def __init__(self, share: float) -> None:
        assert 0 <= share <= 1
        self._bus, self._cpu = share, 1 - share  # experts that each reads in the same time

    def fetched(self, misses: int, behind: int = 0) -> int:
        """Return the number of misses to fetch. behind: experts already in flight on the bus."""
        if not self._cpu:
            return misses
        if not self._bus:
            return 0

        def end(fetched: int) -> tuple[float, int]:
            bus = (behind + fetched) / self._bus if fetched else 0.0
            # Ties: fetch more, because a fetched expert may stay resident.
            return max(bus, (misses - fetched) / self._cpu), -fetched

        return min(range(misses + 1), key=end)
