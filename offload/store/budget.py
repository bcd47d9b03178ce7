"""Convert a memory budget into slots, and compute the smallest budget that works.

Does not know the machine: runtime finds out how much memory is free.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeinf.errors import Unavailable


class DoesNotFit(Unavailable, MemoryError):
    """The memory for experts is below the minimum of the model."""

    code = "does_not_fit"

    def __init__(self, given_bytes: int, min_bytes: int) -> None:
        super().__init__(
            f"{_size(given_bytes)} for experts is too little: at least {min_bytes} bytes "
            f"({_size(min_bytes)}) are needed"
        )
        self.given_bytes = given_bytes
        self.min_bytes = min_bytes
        self.hint = f"--memory {min_bytes}, or the same command after you free some memory"


def _size(count: int) -> str:
    if count < 1 << 20:
        return f"{count / 1024:.1f} KiB"
    return f"{count / (1 << 30):.1f} GiB" if count >= 1000 << 20 else f"{count / (1 << 20):.1f} MiB"


@dataclass(frozen=True)
class SlotBudget:
    """The sizes that decide how many experts a tier holds."""

    slot_bytes: int
    experts: int  # in the whole model: L·E
    top_k: int

    @property
    def min_slots(self) -> int:
        """2·K: the experts of one token in a layer, and K that are read for the next layer."""
        return min(2 * self.top_k, self.experts)

    @property
    def min_bytes(self) -> int:
        return self.min_slots * self.slot_bytes

    @property
    def max_bytes(self) -> int:
        """Bytes with which all experts are resident; more memory has no effect."""
        return self.experts * self.slot_bytes

    def slots(self, memory_bytes: int) -> int:
        """Return the slots within `memory_bytes`, at most one per expert. Raises DoesNotFit."""
        if memory_bytes < self.min_bytes:
            raise DoesNotFit(memory_bytes, self.min_bytes)
        return min(memory_bytes // self.slot_bytes, self.experts)
