"""The default policy: keep the experts that are most probably used next.

native/policy/adaptive_core.h makes its decisions and native/policy/usage.h its estimates. Both
argue them. tests/offload/policy/plain.py is a plain transcription that tests compare them with.
One decode pass asks of them:

    begin_pass   what matched requests of the past did is written to `past`; the mixture is made
    routed       estimates and weights move; hints for this layer are judged; staged cells that are
                 now probable enough are kept
    hinted       the gate's choice is noted, and protected until its layer has run
    prefetch     hints that are worth it, then cells that are more probably used than not

An encoder's experts leave first once it has run. They are judged by probability again when the
next source is read.

A pass of several requests is one token that chose all that they chose. `past` is the sum over all
requests that have not ended, also those of other passes: users in turn share one cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeinf.native import AdaptiveCore
from moeinf.offload.policy.base import Evictable, Prefetch, Setup, Weights
from moeinf.offload.policy.requests import RunningRequests
from moeinf.offload.routing.trace import Phase


@dataclass(frozen=True)
class AdaptiveKnobs:
    """Tunable numbers of the policy.

    hysteresis: ε of admission.
    matches: EAMC entries that are averaged.
    worth: the least probability at which a hinted read pays.
    sure: the least probability at which lookahead reads.
    decays: λ per token of the decayed shares.
    step: the least distance a token moves the weights of the estimates.
    prompt: the number of decode tokens a prompt token counts for in the decayed shares.
    """

    hysteresis: float = 0.25
    matches: int = 5
    worth: float = 0.25
    sure: float = 0.5
    decays: tuple[float, ...] = (0.8, 0.95, 0.98)
    step: float = 0.05
    prompt: float = 1.0


class Adaptive:
    """Evict by probability of use, admit with hysteresis, prefetch the hints that pay."""

    wants_weights = False

    def __init__(self, setup: Setup, knobs: AdaptiveKnobs | None = None) -> None:
        knobs = knobs or AdaptiveKnobs()
        shape = setup.shape
        self._requests = RunningRequests(shape, setup.eamc)
        self._matches, self._top_k = knobs.matches, shape.top_k
        self.core = AdaptiveCore(
            shape.layers,
            shape.experts,
            keep_at_most=self._kept_of(setup.slots),
            hysteresis=knobs.hysteresis,
            worth=knobs.worth,
            sure=knobs.sure,
            decays=knobs.decays,
            step=knobs.step,
            prompt=knobs.prompt,
            encoder_layers=shape.encoder_layers,
        )

    @property
    def insertions(self) -> int:
        return self.core.insertions

    def begin_pass(self, rows: NDArray[np.int64], phase: Phase) -> None:
        self._requests.begin_pass(rows, phase)
        if phase == "decode":
            self._write_predictions()
            youngest = min(request.decode_passes for request in self._requests.active())
            self.core.begin_decode(youngest - 1)
        elif phase == "encode":
            self.core.begin_encode()
        else:
            self.core.begin_prefill()

    def routed(
        self, layer: int, ids: NDArray[np.integer[Any]], weights: Weights | None = None
    ) -> None:
        self._requests.routed(layer, ids)
        self.core.routed(layer, ids)

    def hinted(self, layer: int, ids: NDArray[np.integer[Any]]) -> None:
        self.core.hinted(layer, ids)

    def end_pass(self, accepted: NDArray[np.bool_] | None) -> None:
        self.core.end_pass()

    def end_request(self, request: int) -> None:
        self._requests.end(request)

    def admitted(self, cell: int) -> None:
        self.core.admitted(cell)

    def victim(self, evictable: Evictable) -> int | None:
        return self.core.victim(evictable)

    def forget(self, cells: Iterable[int]) -> None:
        for cell in cells:
            self.core.forget(cell)

    def resize(self, slots: int) -> None:
        self.core.resize(self._kept_of(slots))

    def keeps(self, cell: int) -> bool:
        return self.core.keeps(cell)

    def prefetch(self, most: int) -> Sequence[Prefetch]:
        return [Prefetch(*prefetch) for prefetch in self.core.wishes(most)]

    def _kept_of(self, slots: int) -> int:
        """Return the slots that are not for staging."""
        return slots - min(self._top_k, max(1, slots // 4))

    def _write_predictions(self) -> None:
        """Write the probability per expert that past requests give for all running ones."""
        past = self.core.past
        past.fill(0)
        running = self._requests.running()
        for request in running:
            predicted = request.predict(request.pair_similarity(), self._matches, "decode")
            if predicted is not None:
                past += predicted * self._top_k
        if len(running) > 1:
            np.minimum(past, 1, out=past)
