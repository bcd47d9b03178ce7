"""The interface of a cache policy: routing events in, decisions out.

Does not know files, threads, time or torch. The runtime and the simulator run the same objects, so
a simulated figure is what the engine would do. Experts are *cells*: layer · E + expert.

The caller reports events in this order, per pass:

    begin_pass(rows, phase)
      routed(layer, ids, …)    a layer has chosen; its cells are pinned by the caller
      hinted(layer, ids)       a gate predicts the choice of a later layer (optional)
      victim() / admitted()    per miss: the cell to evict, the cell that has arrived
      forget()                 an admitted cell has not arrived, or left otherwise
      prefetch()               what is worth reading now, best first
    end_pass(accepted)
    end_request(request)       no further pass names it

Events may come up to one pass late: a decode step captured in a graph reports afterwards.
Decisions are then requested in between, and a policy must answer from the events it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.routing.eamc import Eamc
from moeinf.offload.routing.trace import Phase, RoutingShape

Evictable = Callable[[int], bool]
Weights = NDArray[np.float32]  # [T, K], of the gate; their scale is the model's own
_LARGEST = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Setup:
    """The inputs of a policy: a model's shape, the slots of one tier, and past requests.

    The caller adds finished requests to the EAMC. The policy only reads it.
    """

    shape: RoutingShape
    slots: int
    eamc: Eamc | None = None

    @property
    def cells(self) -> int:
        return self.shape.layers * self.shape.experts


class Prefetch(NamedTuple):
    """An expert worth reading ahead of demand.

    urgent: a gate's hint, before any lookahead. probability: of its use when its layer comes next;
    1: no estimate. A claim that is too high in the mean is corrected (store/prefetch_gate.py).
    """

    cell: int
    urgent: bool
    probability: float = 1.0


class Policy(Protocol):
    """Decides which cell to evict, keep or prefetch. See the module for the order."""

    wants_weights: bool  # True: `routed` is given the gate's weights

    @property
    def insertions(self) -> int:
        """Number of arrivals, ever, that were given a place to stay."""
        ...

    def begin_pass(self, rows: NDArray[np.int64], phase: Phase) -> None:
        """Start a pass of T rows; rows [T] names the request of each."""
        ...

    def routed(
        self, layer: int, ids: NDArray[np.integer[Any]], weights: Weights | None = None
    ) -> None:
        """Report that `layer` has chosen ids [T, K]; -1: no expert. Layers ascend in a pass.

        weights: None unless they are wanted and, in a replay, recorded.
        """
        ...

    def hinted(self, layer: int, ids: NDArray[np.integer[Any]]) -> None:
        """Report the probable ids [T, H] of a later `layer` of this pass, the surest first."""
        ...

    def end_pass(self, accepted: NDArray[np.bool_] | None) -> None:
        """End the pass; rows that accepted [T] denies are not history. None: all are accepted."""
        ...

    def end_request(self, request: int) -> None:
        """Forget the request: no further event belongs to it."""
        ...

    def admitted(self, cell: int) -> None:
        """Report that `cell` now has a slot and its bytes."""
        ...

    def victim(self, evictable: Evictable) -> int | None:
        """Return the admitted cell to evict among those that `evictable` allows, or None.

        The policy forgets the cell's residency: the caller evicts it.
        """
        ...

    def forget(self, cells: Iterable[int]) -> None:
        """Forget that these cells are resident: they left without `victim`, or never arrived.

        A cell that was not admitted is ignored.
        """
        ...

    def resize(self, slots: int) -> None:
        """Report that the tier has another number of slots, between passes.

        If it is smaller, `victim` has named the cells that had to leave.
        """
        ...

    def keeps(self, cell: int) -> bool:
        """Return whether an arriving `cell` would stay, in the place of another cell.

        For a tier above one where a miss can be computed in place: False saves the copy.
        """
        ...

    def prefetch(self, most: int) -> Sequence[Prefetch]:
        """Return up to `most` cells worth reading now, best first; the caller skips resident ones.

        The result replaces the earlier prefetches: those that are still queued are cancelled.
        """
        ...


class Passive:
    """The answers of a policy that keeps every miss and prefetches nothing."""

    wants_weights = False

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.insertions = 0

    def begin_pass(self, rows: NDArray[np.int64], phase: Phase) -> None: ...

    def routed(
        self, layer: int, ids: NDArray[np.integer[Any]], weights: Weights | None = None
    ) -> None: ...

    def hinted(self, layer: int, ids: NDArray[np.integer[Any]]) -> None: ...

    def end_pass(self, accepted: NDArray[np.bool_] | None) -> None: ...

    def end_request(self, request: int) -> None: ...

    def resize(self, slots: int) -> None:
        self.setup = replace(self.setup, slots=slots)

    def keeps(self, cell: int) -> bool:
        return True

    def prefetch(self, most: int) -> Sequence[Prefetch]:
        return ()


def chosen_cells(layer: int, ids: NDArray[np.integer[Any]], experts: int) -> list[int]:
    """Return the distinct cells of ids [T, K] without -1; several rows ascend.

    One row keeps its order.
    """
    first = layer * experts
    if len(ids) == 1:
        return [first + expert for expert in ids[0].tolist() if expert >= 0]
    return [first + expert for expert in sorted(set(ids.ravel().tolist())) if expert >= 0]


def lowest(keys: NDArray[Any], evictable: Evictable) -> int | None:
    """Return the evictable cell with the smallest key, or None.

    Keys are float or int64. A cell that is not a candidate has the type's largest value.
    """
    largest = np.inf if keys.dtype.kind == "f" else _LARGEST
    passed: list[tuple[int, Any]] = []
    cell = int(keys.argmin())
    while (key := keys[cell]) != largest and not evictable(cell):
        passed.append((cell, key))
        keys[cell] = largest
        cell = int(keys.argmin())
    for other, kept in passed:
        keys[other] = kept
    return None if key == largest else cell
