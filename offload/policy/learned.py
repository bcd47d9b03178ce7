"""A learned policy: keep the experts that a trained network expects to be used soonest.

native/policy/forecast.h has the inputs and the network. The decisions are those of `adaptive`
(native/policy/adaptive_core.h) with another score. scripts/train_eviction.py trains the network and
writes learned_net.py. Decisions 0076 and 0089 have the measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.policy.adaptive import Adaptive, AdaptiveKnobs
from moeinf.offload.policy.base import Setup, Weights
from moeinf.offload.policy.learned_net import NET
from moeinf.offload.routing.trace import Phase

KNOBS = AdaptiveKnobs(hysteresis=0.0, sure=0.8, decays=(0.6, 0.8, 0.9, 0.95, 0.98))


class Learned(Adaptive):
    """Evict by the forecast of a trained network; admit and prefetch like `adaptive`."""

    def __init__(self, setup: Setup, net: Mapping[str, Sequence[float]] = NET) -> None:
        super().__init__(setup, KNOBS)
        self.core.forecast_with(setup.shape.top_k, net)
        self._decoding = False

    def begin_pass(self, rows: NDArray[np.int64], phase: Phase) -> None:
        self._decoding = phase == "decode"
        self.core.begin_rows(rows.tolist(), self._decoding)
        super().begin_pass(rows, phase)

    def routed(
        self, layer: int, ids: NDArray[np.integer[Any]], weights: Weights | None = None
    ) -> None:
        self._requests.routed(layer, ids)
        if not self._decoding:  # requests like the prompt so far judge which of its experts stay
            self._write_predictions()
        self.core.routed(layer, ids)

    def end_pass(self, accepted: NDArray[np.bool_] | None) -> None:
        self.core.end_pass([] if accepted is None else accepted.tolist())

    def end_request(self, request: int) -> None:
        super().end_request(request)
        self.core.end_request(request)
