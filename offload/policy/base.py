"""What a cache policy is: routing events in, decisions out.

Does not know files, threads, time or torch: the runtime and the simulator run the same objects, so
that a simulated figure is what the engine would do. Experts are *cells*: layer · E + expert.

The caller tells what happens, in this order, per pass:

    begin_pass(rows, phase)
      routed(layer, ids)       a layer has chosen; its cells are pinned by the caller
      hinted(layer, ids)       a gate says what a later layer will choose (optional)
      victim() / admitted()    per miss: who leaves, who has come
      forget()                 a cell that was admitted has not arrived, or left otherwise
      prefetch()               what is worth reading now, best first
    end_pass(accepted)
    end_request(request)       no further pass names it

Events may come up to one pass late (a decode captured in a graph reports afterwards); decisions
are then asked for in between, and a policy must answer from what it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.routing.eamc import Eamc
from moeinf.offload.routing.trace import Phase, RoutingShape

Evictable = Callable[[int], bool]
_LARGEST = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Setup:
    """What a policy is built for: a model's shape, the slots of one tier, and past requests.

    Whoever runs the policy adds finished requests to the EAMC; the policy only reads it.
    """

    shape: RoutingShape
    slots: int
    eamc: Eamc | None = None

    @property
    def cells(self) -> int:
        return self.shape.layers * self.shape.experts


class Wish(NamedTuple):
    """An expert worth reading ahead of demand. `urgent`: a gate's hint, before any lookahead."""

    cell: int
    urgent: bool


class Policy(Protocol):
    """Decides who leaves, who stays and what to read ahead. See the module for the order."""

    @property
    def insertions(self) -> int:
        """Arrivals that were given a place to stay, ever."""
        ...

    def begin_pass(self, rows: NDArray[np.int64], phase: Phase) -> None:
        """A pass of T rows starts; rows [T] names the request of each."""
        ...

    def routed(self, layer: int, ids: NDArray[np.integer[Any]]) -> None:
        """`layer` has chosen ids [T, K]; -1 = none. Layers ascend within a pass."""
        ...

    def hinted(self, layer: int, ids: NDArray[np.integer[Any]]) -> None:
        """`layer`, to come in this pass, will probably choose ids [T, H], the surest first."""
        ...

    def end_pass(self, accepted: NDArray[np.bool_] | None) -> None:
        """The pass is over; rows that accepted [T] denies (None: none) are not history."""
        ...

    def end_request(self, request: int) -> None:
        """Nothing more comes of this request."""
        ...

    def admitted(self, cell: int) -> None:
        """`cell` now has a slot and its bytes."""
        ...

    def victim(self, evictable: Evictable) -> int | None:
        """The admitted cell to evict among those that `evictable` allows; None if there is none.

        The policy forgets the cell's residency: the caller evicts it.
        """
        ...

    def forget(self, cells: Iterable[int]) -> None:
        """Forget that these cells are resident: they left without `victim`, or never arrived.

        A cell that was not admitted is ignored.
        """
        ...

    def keeps(self, cell: int) -> bool:
        """Whether an arriving `cell` would be given a place to stay, at the cost of another's.

        For a tier above one where a miss can be computed in place: False saves the copy.
        """
        ...

    def prefetch(self, most: int) -> Sequence[Wish]:
        """Up to `most` cells worth reading now, best first; the caller skips what is resident.

        Replaces what was wished before: wishes that are still queued are cancelled.
        """
        ...


class Passive:
    """The answers of a policy that only reacts to misses: everything read stays, nothing ahead."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.insertions = 0

    def begin_pass(self, rows: NDArray[np.int64], phase: Phase) -> None: ...

    def routed(self, layer: int, ids: NDArray[np.integer[Any]]) -> None: ...

    def hinted(self, layer: int, ids: NDArray[np.integer[Any]]) -> None: ...

    def end_pass(self, accepted: NDArray[np.bool_] | None) -> None: ...

    def end_request(self, request: int) -> None: ...

    def keeps(self, cell: int) -> bool:
        return True

    def prefetch(self, most: int) -> Sequence[Wish]:
        return ()


def chosen_cells(layer: int, ids: NDArray[np.integer[Any]], experts: int) -> list[int]:
    """The distinct cells of ids [T, K], without -1. One row keeps its order, several ascend."""
    first = layer * experts
    if len(ids) == 1:
        return [first + expert for expert in ids[0].tolist() if expert >= 0]
    return [first + expert for expert in sorted(set(ids.ravel().tolist())) if expert >= 0]


def lowest(keys: NDArray[Any], evictable: Evictable) -> int | None:
    """The cell with the smallest key that may go; keys, float or int64, of cells that are not
    candidates are the type's largest value. None if there is none."""
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
