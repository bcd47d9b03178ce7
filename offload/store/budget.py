"""Turns a memory budget into slots, and says what is the least that works.

Does not know the machine: how much memory is free is runtime's business.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeinf.errors import Unavailable


class DoesNotFit(Unavailable, MemoryError):
    """The memory given for experts is below the least with which the model can run."""

    code = "does_not_fit"

    def __init__(self, given_bytes: int, min_bytes: int) -> None:
        super().__init__(
            f"{_size(given_bytes)} for experts is too little: at least {min_bytes} bytes "
            f"({_size(min_bytes)}) are needed"
        )
        self.given_bytes = given_bytes
        self.min_bytes = min_bytes
        self.hint = f"--memory {min_bytes}, or the same again after you free some memory"


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1000 << 20 else f"{count / (1 << 20):.1f} MiB"


@dataclass(frozen=True)
class SlotBudget:
    """The sizes that decide how many experts a tier holds."""

    slot_bytes: int
    experts: int  # in the whole model: L·E
    top_k: int

    @property
    def min_slots(self) -> int:
        """2·K: the experts that one token uses in a layer, and as many being read for the next."""
        return min(2 * self.top_k, self.experts)

    @property
    def min_bytes(self) -> int:
        return self.min_slots * self.slot_bytes

    @property
    def max_bytes(self) -> int:
        """All experts resident; more memory brings nothing."""
        return self.experts * self.slot_bytes

    def slots(self, memory_bytes: int) -> int:
        """Slots within `memory_bytes`, never more than experts. Raises DoesNotFit."""
        if memory_bytes < self.min_bytes:
            raise DoesNotFit(memory_bytes, self.min_bytes)
        return min(memory_bytes // self.slot_bytes, self.experts)
