"""Turns a memory budget into slots, and says what is the least that works.

Does not know the machine: how much memory is free is runtime's business.
"""

from __future__ import annotations

from dataclasses import dataclass


class DoesNotFit(MemoryError):
    """The memory given for experts is below the least with which the model can run."""

    def __init__(self, given_bytes: int, min_bytes: int) -> None:
        super().__init__(f"{given_bytes} bytes given for experts, at least {min_bytes} needed")
        self.given_bytes = given_bytes
        self.min_bytes = min_bytes


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
