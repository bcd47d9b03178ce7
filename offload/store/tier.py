"""What a tier is: equal slots in one memory, a policy that says which cells have them.

Does not know which tiers there are. A store is given them from the host upward; what a tier lacks,
the one below gives, and the host's reads it from the disk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moeinf.offload.policy.base import Policy
from moeinf.offload.routing.trace import Phase
from moeinf.offload.store.routed import Ids, Routed

Hint = tuple[int, Ids]  # a later layer, and ids [T, H] that it will probably choose
Experts = Sequence[tuple[int, list[int]]]  # (cell, places t·K + k)


class Tier(Protocol):
    """One memory's slots. Cells are layer · E + expert; `policy` sees all routing of the tier."""

    policy: Policy

    @property
    def slots(self) -> int: ...

    @property
    def count(self) -> int:
        """Experts that are there now."""
        ...

    @property
    def all_fit(self) -> bool:
        """Whether no expert ever has to leave."""
        ...

    def resident(self, cells: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """Of cells of any shape: which are there, to be computed with."""
        ...

    def bring(self, cells: Iterable[int], busy: Collection[int] = ()) -> list[int]:
        """Asks for the bytes of the first of these, as many as there is room for; which they are.

        None of the cells leaves for another of them, and a `busy` one leaves only if no other can.
        """
        ...

    def evict(self, busy: Collection[int] = ()) -> int | None:
        """Frees the slot of the policy's victim; which cell that was, None: no cell may leave."""
        ...

    def forget(self, cells: Iterable[int]) -> None:
        """Frees the slots of cells whose bytes will not come."""
        ...

    def compute(self, x: Tensor, experts: Experts, top_k: int, rows: Tensor) -> None:
        """Fills the rows [T·K, D] of resident cells for x [T, D], where this memory is."""
        ...

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """rows [T, K, D] and weights [T, K] -> [T, D]: the sum over K, in a fixed order."""
        ...

    def begin_pass(self, rows: NDArray[np.int64], phase: Phase) -> None: ...

    def end_pass(self, accepted: NDArray[np.bool_] | None) -> None: ...

    def close(self) -> None: ...


class Upper(Tier, Protocol):
    """A tier above the host's."""

    @property
    def complete(self) -> bool:
        """Whether all experts have arrived, for good."""
        ...

    @property
    def wants_all(self) -> bool:
        """Whether it gains from experts that were not asked for."""
        ...

    @property
    def lost(self) -> bool:
        """Whether it has no slot any more: only a new store will have some."""
        ...

    @property
    def note(self) -> str | None:
        """What it had to do without, and why; None: nothing, yet."""
        ...

    def end_copies(self) -> bool:
        """Waits until no copy reads a slot below. False: none did."""
        ...

    def shrink(self) -> bool:
        """Gives half of the slots back, between layers. False: there is one slot only."""
        ...

    def give_up(self, size_bytes: int, of_slots_bytes: int) -> int | None:
        """Gives so much memory back, for good: how many slots that took; None: it has not got it.

        of_slots_bytes: the part of it that slots must give.
        """
        ...


class Pending(Protocol):
    """A submitted layer."""

    def result(self) -> Tensor:
        """[T, D]."""
        ...


class Work(Protocol):
    """The arithmetic of one open layer, wherever that is done."""

    def compute(self, cells: Iterable[int]) -> None:
        """Of cells in host slots, which do not leave before this returns."""
        ...

    def result(self) -> Tensor:
        """[T, D], once all cells are computed."""
        ...


# What the host's tier has to provide of a layer, and of a hint, and who computes it.
Opened = tuple[Routed, Hint | None, Work]


class Runner(Protocol):
    """Opens layers: decides where they are computed."""

    def open(
        self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, hint: tuple[int, Tensor] | None
    ) -> Opened | Pending:
        """x [T, D], ids and weights [T, K]. Pending: the host's tier has nothing to do."""
        ...
