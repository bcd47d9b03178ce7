"""A policy that evicts by one policy and reads ahead by another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.policy.base import Evictable, Passive, Policy, Prefetch, Setup, Weights
from moeinf.offload.policy.table import POLICIES
from moeinf.offload.routing.trace import Phase


def composed(evicting: str, ahead: str) -> Callable[[Setup], Policy]:
    """Return what makes a policy of two; ahead: "" reads nothing ahead."""

    def make(setup: Setup) -> Policy:
        both = [POLICIES[name](setup) for name in (evicting, ahead) if name]
        return Composed(setup, both)

    return make


class Composed(Passive):
    """Tell every event to each policy; the first chooses victims, the second reads ahead."""

    def __init__(self, setup: Setup, policies: Sequence[Policy]) -> None:
        super().__init__(setup)
        self._all = policies

    def begin_pass(self, rows: NDArray[np.int64], phase: Phase) -> None:
        for policy in self._all:
            policy.begin_pass(rows, phase)

    def routed(
        self, layer: int, ids: NDArray[np.integer[Any]], weights: Weights | None = None
    ) -> None:
        for policy in self._all:
            policy.routed(layer, ids, weights)

    def end_pass(self, accepted: NDArray[np.bool_] | None) -> None:
        for policy in self._all:
            policy.end_pass(accepted)

    def end_request(self, request: int) -> None:
        for policy in self._all:
            policy.end_request(request)

    def admitted(self, cell: int) -> None:
        self.insertions += 1
        for policy in self._all:
            policy.admitted(cell)

    def victim(self, evictable: Evictable) -> int | None:
        cell = self._all[0].victim(evictable)
        if cell is not None:
            for policy in self._all[1:]:
                policy.forget([cell])
        return cell

    def forget(self, cells: Iterable[int]) -> None:
        gone = list(cells)
        for policy in self._all:
            policy.forget(gone)

    def prefetch(self, most: int) -> Sequence[Prefetch]:
        return self._all[1].prefetch(most) if len(self._all) > 1 else ()
