"""The interface of a tier: equal slots in one memory, and a policy that assigns them.

Does not know which tiers there are. A store is given them from the host upward. The tier below
provides the experts that a tier lacks, and the host's reads them from the disk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moeinf.offload.policy.base import Policy
from moeinf.offload.routing.trace import Phase
from moeinf.offload.store.residency import Residency
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
        """True if all experts fit, so that none ever has to leave."""
        ...

    def resident(self, cells: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """Return, for cells of any shape, which can be computed with here."""
        ...

    def bring(self, cells: Iterable[int], busy: Collection[int] = ()) -> list[int]:
        """Ask for the bytes of the first of these, up to the free room; return which.

        None of the cells is evicted for another of them. A `busy` cell is evicted only if no other
        can be.
        """
        ...

    def evict(self, busy: Collection[int] = ()) -> int | None:
        """Free the slot of the policy's victim and return it; None: no cell may leave."""
        ...

    def forget(self, cells: Iterable[int]) -> None:
        """Free the slots of cells whose reads failed or were cancelled."""
        ...

    def compute(self, x: Tensor, experts: Experts, top_k: int, rows: Tensor) -> None:
        """Fill the rows [T·K, D] of resident cells of one layer for x [T, D], in this memory."""
        ...

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Sum rows [T, K, D] by weights [T, K] -> [T, D], in a fixed order over K."""
        ...

    def begin_pass(self, rows: NDArray[np.int64], phase: Phase) -> None: ...

    def end_pass(self, accepted: NDArray[np.bool_] | None) -> None: ...

    def close(self) -> None: ...


class Upper(Tier, Protocol):
    """A tier above the host's. table: its slots, which `shrink` replaces."""

    table: Residency

    @property
    def complete(self) -> bool:
        """True if all experts have arrived and stay resident."""
        ...

    @property
    def wants_all(self) -> bool:
        """True if it accepts experts that no layer requested."""
        ...

    @property
    def lost(self) -> bool:
        """True if it has lost all its slots; only a new store has slots again."""
        ...

    @property
    def note(self) -> str | None:
        """A line that describes a problem and its cause; None: no problem so far."""
        ...

    def end_copies(self) -> bool:
        """Wait until no copy reads a slot below. False: no copy did."""
        ...

    def shrink(self) -> bool:
        """Release half of the slots, between layers. False: there is only one slot."""
        ...

    def give_up(self, size_bytes: int, of_slots_bytes: int) -> int | None:
        """Release memory permanently; return the number of slots that this took, None if too large.

        of_slots_bytes: the part of size_bytes that slots must release.
        """
        ...


class Pending(Protocol):
    """A submitted layer."""

    def result(self) -> Tensor:
        """Return [T, D]."""
        ...


class Work(Protocol):
    """The arithmetic of one open layer, on any device."""

    def compute(self, cells: Iterable[int]) -> None:
        """Compute cells in host slots, which do not leave before this returns."""
        ...

    def result(self) -> Tensor:
        """Return [T, D], once all cells are computed."""
        ...


# The part of a layer and of a hint that is left to the host's tier, and the arithmetic.
Opened = tuple[Routed, Hint | None, Work]


class Runner(Protocol):
    """Opens layers: decides where they are computed."""

    def open(
        self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, hint: tuple[int, Tensor] | None
    ) -> Opened | Pending:
        """Open a layer: x [T, D], ids, weights [T, K]. Pending: the host's tier has no part."""
        ...
