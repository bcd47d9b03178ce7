"""Which misses of the device are fetched over the bus, and which are computed where they lie.

Does not know experts or policies. Both sides are bound by how fast they read an expert's bytes, at
the same time: the bus beside a computing CPU, the CPU beside a busy bus. m misses end soonest when
both take equally long: n = m · bus / (bus + CPU) of them are fetched. What rounding leaves over is
carried to the next layer, so that the share is right over many layers of few misses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Miss = Literal["auto", "compute", "fetch"]
MISSES: tuple[Miss, ...] = get_args(Miss)
FEW_ROWS = 16  # of one expert: the CPU's time grows with them, the bus's does not


@dataclass(frozen=True)
class Contended:
    """Bytes per second of experts, both measured while the other was busy."""

    bus_bytes_per_s: float
    cpu_bytes_per_s: float

    @property
    def fetched_share(self) -> float:
        """Of the misses, by bytes."""
        return self.bus_bytes_per_s / (self.bus_bytes_per_s + self.cpu_bytes_per_s)


class Split:
    """Divides one layer's misses after another. share: of those that are fetched, 0 … 1."""

    def __init__(self, share: float) -> None:
        assert 0 <= share <= 1
        self._share = share
        self._carried = 0.0

    def fetched(self, misses: int) -> int:
        """How many of these misses are fetched."""
        wanted = misses * self._share + self._carried
        count = min(misses, int(wanted + 1e-9))
        self._carried = wanted - count
        return count
