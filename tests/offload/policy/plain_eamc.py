"""Implement the policy `eamc` in plain numpy, as a reference for tests.

It is slow. Every float32 operation has the order of native/policy/eamc_core.h, and every sort is
stable, so that decisions are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.policy.base import Passive, Prefetch, Setup, Weights, chosen_cells
from moeinf.offload.policy.requests import RunningRequests
from moeinf.offload.routing.eamc import eviction_priorities, normalised, prefetch_priorities
from moeinf.offload.routing.trace import Phase

Evictable = Callable[[int], bool]


class PlainEamc(Passive):
    """Evicts and prefetches by Algorithm 1 of the paper, all cells at a time."""

    def __init__(self, setup: Setup, matches: int = 1, epsilon: float = 1e-3) -> None:
        super().__init__(setup)
        self._matches, self._epsilon = matches, epsilon
        shape = setup.shape
        self._requests = RunningRequests(shape, setup.eamc)
        self._layer, self._time = -1, 0
        self._phase: Phase = "prefill"
        self._resident = np.zeros(setup.cells, np.bool_)
        self._last_use = np.zeros(setup.cells, np.int64)
        self._predicted(np.full((shape.layers, shape.experts), 1 / shape.experts, np.float32))

    def begin_pass(self, rows: NDArray[np.int64], phase: Phase) -> None:
        self._requests.begin_pass(rows, phase)
        self._layer, self._phase = -1, phase
        self._predicted(self._prediction)
        if any(r.decode_passes == 1 and phase == "decode" for r in self._requests.active()):
            self._predict()

    def routed(
        self, layer: int, ids: NDArray[np.integer[Any]], weights: Weights | None = None
    ) -> None:
        self._layer = layer
        self._requests.routed(layer, ids)
        self._time += 1
        self._last_use[chosen_cells(layer, ids, self.setup.shape.experts)] = self._time
        self._predict()

    def end_request(self, request: int) -> None:
        self._requests.end(request)

    def admitted(self, cell: int) -> None:
        self.insertions += 1
        self._resident[cell] = True

    def victim(self, evictable: Evictable) -> int | None:
        (candidates,) = np.nonzero(self._resident)
        keys = self._eviction.ravel()[candidates]
        while len(candidates):
            least = keys.min()
            ties = np.flatnonzero(keys <= least + abs(least) * 1e-6)
            for tie in ties[self._last_use[candidates[ties]].argsort(kind="stable")]:
                cell = int(candidates[tie])
                if evictable(cell):
                    self._resident[cell] = False
                    return cell
            candidates, keys = np.delete(candidates, ties), np.delete(keys, ties)
        return None

    def forget(self, cells: Iterable[int]) -> None:
        self._resident[list(cells)] = False

    def prefetch(self, most: int) -> Sequence[Prefetch]:
        if not len(self._requests.eamc) or self._layer >= self.setup.shape.layers - 1:
            return ()
        first = (self._layer + 1) * self.setup.shape.experts
        ahead = prefetch_priorities(self._prediction, self._layer).ravel()[first:]
        ahead = np.where(self._resident[first:], 0, ahead)
        if self._resident.sum() >= self.setup.slots:
            keys = self._eviction.ravel()
            ahead[keys[first:] <= keys[self._resident].min()] = 0
        best = (-ahead).argsort(kind="stable")[:most]
        return [Prefetch(first + int(place), False) for place in best if ahead[place] > 0]

    def _predict(self) -> None:
        active = self._requests.active()
        eamc = self._requests.eamc
        if not len(eamc):
            return
        places = [eamc.best(request.similarity(), self._matches) for request in active]
        parts = [normalised(eamc.sum_of(found, self._phase)) for found in places]
        if parts:
            self._predicted(parts[0] if len(parts) == 1 else normalised(np.sum(parts, 0)))

    def _predicted(self, prediction: NDArray[np.float32]) -> None:
        self._prediction = prediction
        self._eviction = eviction_priorities(prediction, self._epsilon)
        if self._phase != "encode":
            self._eviction[: self.setup.shape.encoder_layers] = -1
