"""The paper's policy: activation-aware eviction and prefetch from the EAMC alone.

Does not know recency, counts over time or a gate's hints; `adaptive` adds those.

Source: MoE-Infinity (arXiv 2401.14361 v3), PredictEAM and Algorithm 1. After every routing decision
the running request is matched in the EAMC on the observed rows; eviction takes the smallest
(P + ε)·(1 - i/L), prefetch the largest P·(1 - (i - l)/L). With several requests active P is the sum
over them, normalised again. Rows that cannot run again (the encoder's, once decoding) leave first;
among equals the cell used longest ago leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.policy.base import Evictable, Passive, Setup, Wish, chosen_cells
from moeinf.offload.policy.requests import RunningRequests
from moeinf.offload.routing.eamc import Floats, eviction_priorities, normalised, prefetch_priorities
from moeinf.offload.routing.trace import Phase


@dataclass(frozen=True)
class EamcKnobs:
    """matches: entries that are summed. epsilon: Algorithm 1's ε."""

    matches: int = 1
    epsilon: float = 1e-3


class EamcPolicy(Passive):
    """Evicts and prefetches by what past requests like this one did."""

    def __init__(self, setup: Setup, knobs: EamcKnobs | None = None) -> None:
        super().__init__(setup)
        self._knobs = knobs or EamcKnobs()
        shape = setup.shape
        self._requests = RunningRequests(shape, setup.eamc)
        self._layer = -1
        self._phase: Phase = "prefill"
        self._resident = np.zeros(setup.cells, np.bool_)
        self._last_use = np.zeros(setup.cells, np.int64)
        self._time = 0
        uniform = np.full((shape.layers, shape.experts), 1 / shape.experts, np.float32)
        self._set_prediction(uniform)

    def begin_pass(self, rows: NDArray[np.int64], phase: Phase) -> None:
        self._requests.begin_pass(rows, phase)
        self._layer, self._phase = -1, phase
        if self.setup.shape.encoder_layers:  # which may have run now, or be about to
            self._set_prediction(self._prediction)
        if any(r.decode_passes == 1 and phase == "decode" for r in self._requests.active()):
            self._predict()

    def routed(self, layer: int, ids: NDArray[np.integer[Any]]) -> None:
        self._layer = layer
        self._requests.routed(layer, ids)
        cells = chosen_cells(layer, ids, self.setup.shape.experts)
        self._time += 1
        self._last_use[cells] = self._time
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
            for tie in ties[self._last_use[candidates[ties]].argsort()]:
                cell = int(candidates[tie])
                if evictable(cell):
                    self._resident[cell] = False
                    return cell
            candidates, keys = np.delete(candidates, ties), np.delete(keys, ties)
        return None

    def forget(self, cells: Iterable[int]) -> None:
        self._resident[list(cells)] = False

    def prefetch(self, most: int) -> Sequence[Wish]:
        if not len(self._requests.eamc) or self._layer >= self.setup.shape.layers - 1:
            return ()
        first = (self._layer + 1) * self.setup.shape.experts  # later layers only
        ahead = prefetch_priorities(self._prediction, self._layer).ravel()[first:]
        ahead = np.where(self._resident[first:], 0, ahead)
        if self._resident.sum() >= self.setup.slots:  # never at the cost of a likelier one
            keys = self._eviction.ravel()
            ahead[keys[first:] <= keys[self._resident].min()] = 0
        best = np.argpartition(-ahead, min(most, len(ahead) - 1))[:most]
        best = best[ahead[best] > 0]
        return [Wish(first + int(place), False) for place in best[(-ahead[best]).argsort()]]

    def _predict(self) -> None:
        active = self._requests.active()
        parts = [r.predict(r.similarity(), self._knobs.matches, self._phase) for r in active]
        known = [part for part in parts if part is not None]
        if known:
            total = known[0] if len(known) == 1 else normalised(np.sum(known, 0))
            if total is not self._prediction:
                self._set_prediction(total)

    def _set_prediction(self, prediction: Floats) -> None:
        self._prediction = prediction
        self._eviction = eviction_priorities(prediction, self._knobs.epsilon)
        if self._phase != "encode":
            self._eviction[: self.setup.shape.encoder_layers] = -1
