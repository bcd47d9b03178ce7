"""The paper's policy: activation-aware eviction and prefetch from the EAMC alone.

`adaptive` adds recency, counts over time and a gate's hints.

Source: MoE-Infinity (arXiv 2401.14361 v3), PredictEAM and Algorithm 1. After every routing
decision the running request is matched in the EAMC on the observed rows. Eviction takes the
smallest (P + ε)·(1 - i/L), prefetch the largest P·(1 - (i - l)/L). With several active requests P
is the sum over them, normalised again. Rows that cannot run again (the encoder's, once decoding)
leave first. Among equals the cell used longest ago leaves. native/policy/eamc_core.h has the
arithmetic. tests/offload/policy/plain_eamc.py is a plain transcription that tests compare it with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeinf.native import EamcCore
from moeinf.offload.policy.base import Evictable, Passive, Prefetch, Setup, Weights
from moeinf.offload.policy.requests import RunningRequests
from moeinf.offload.routing.eamc import Floats, normalised
from moeinf.offload.routing.trace import Phase


@dataclass(frozen=True)
class EamcKnobs:
    """Tunable numbers of the policy. matches: entries that are summed. epsilon: Algorithm 1's ε."""

    matches: int = 1
    epsilon: float = 1e-3


class EamcPolicy(Passive):
    """Evict and prefetch by the routing of similar past requests."""

    def __init__(self, setup: Setup, knobs: EamcKnobs | None = None) -> None:
        super().__init__(setup)
        self._knobs = knobs or EamcKnobs()
        shape = setup.shape
        self._requests = RunningRequests(shape, setup.eamc)
        self._phase: Phase = "prefill"
        self._prediction: Floats | None = None  # the prediction that the core has
        self._core = EamcCore(
            shape.layers,
            shape.experts,
            setup.slots,
            epsilon=self._knobs.epsilon,
            encoder_layers=shape.encoder_layers,
        )

    def begin_pass(self, rows: NDArray[np.int64], phase: Phase) -> None:
        self._requests.begin_pass(rows, phase)
        self._phase = phase
        self._core.begin_pass(phase == "encode")
        if phase == "decode" and any(r.decode_passes == 1 for r in self._requests.active()):
            self._predict()

    def routed(
        self, layer: int, ids: NDArray[np.integer[Any]], weights: Weights | None = None
    ) -> None:
        self._requests.routed(layer, ids)
        self._core.routed(layer, ids)
        self._predict()

    def end_request(self, request: int) -> None:
        self._requests.end(request)

    def admitted(self, cell: int) -> None:
        self.insertions += 1
        self._core.admitted(cell)

    def victim(self, evictable: Evictable) -> int | None:
        return self._core.victim(evictable)

    def forget(self, cells: Iterable[int]) -> None:
        for cell in cells:
            self._core.forget(cell)

    def resize(self, slots: int) -> None:
        super().resize(slots)
        self._core.resize(slots)

    def prefetch(self, most: int) -> Sequence[Prefetch]:
        if not len(self._requests.eamc):
            return ()
        return [Prefetch(cell, False) for cell in self._core.wishes(most)]

    def _predict(self) -> None:
        active = self._requests.active()
        parts = [r.predict(r.similarity(), self._knobs.matches, self._phase) for r in active]
        known = [part for part in parts if part is not None]
        if known:
            total = known[0] if len(known) == 1 else normalised(np.sum(known, 0))
            if total is not self._prediction:
                self._prediction = total
                self._core.predict(total)
