"""Which misses of the device are fetched over the bus, and which are computed where they lie.

Does not know experts or policies. Both sides are bound by how fast they read an expert's bytes, at
the same time: the bus beside a computing CPU, the CPU beside a busy bus. The bus may have others to
carry first. So many of a layer's misses are fetched that the later of the two ends soonest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from msgspec import Meta

Miss = Literal["auto", "compute", "fetch"]
MISSES: tuple[Miss, ...] = get_args(Miss)
BytesPerSecond = Annotated[float, Meta(gt=0)]
FEW_ROWS = 16  # of one expert: the CPU's time grows with them, the bus's does not


@dataclass(frozen=True)
class Contended:
    """Bytes per second of experts, both measured while the other was busy."""

    bus_bytes_per_s: BytesPerSecond
    cpu_bytes_per_s: BytesPerSecond

    @property
    def fetched_share(self) -> float:
        """Of the misses, by bytes."""
        return self.bus_bytes_per_s / (self.bus_bytes_per_s + self.cpu_bytes_per_s)


class Split:
    """Divides a layer's misses. share: of those that both would take equally long for, 0 … 1."""

    def __init__(self, share: float) -> None:
        assert 0 <= share <= 1
        self._bus, self._cpu = share, 1 - share  # experts that each reads in the same time

    def fetched(self, misses: int, behind: int = 0) -> int:
        """How many of these misses are fetched. behind: experts that are on their way already."""
        if not self._cpu:
            return misses
        if not self._bus:
            return 0

        def end(fetched: int) -> tuple[float, int]:
            bus = (behind + fetched) / self._bus if fetched else 0.0
            return max(bus, (misses - fetched) / self._cpu), -fetched  # who is fetched may stay

        return min(range(misses + 1), key=end)
