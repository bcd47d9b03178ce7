"""What each running request has routed so far, and what past requests say that it will route.

Does not know residency or counts over time. Shared by the policies that read the EAMC.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.eamc import Eamc, Floats, Matcher, normalised
from moeinf.offload.trace import Phase, RoutingShape, eam_row


class RunningRequest:
    """One request: a running match per phase."""

    def __init__(self, eamc: Eamc) -> None:
        self._eamc = eamc
        self._matchers: dict[Phase, Matcher] = {}
        self.decode_passes = 0

    def begin_pass(self, phase: Phase) -> None:
        self.phase: Phase = "decode" if phase == "decode" else "prefill"
        self.decode_passes += phase == "decode"
        matcher = self._matchers.get(self.phase)
        if matcher is None:
            self._matchers[self.phase] = Matcher(self._eamc, self.phase)
        else:
            matcher.begin_pass()

    def routed(self, layer: int, ids: NDArray[np.integer[Any]]) -> None:
        """This request's rows [t, K] chose ids in `layer`."""
        matcher = self._matchers[self.phase]
        if len(ids) == 1 and ids.min() >= 0:
            matcher.observe_ids(layer, ids[0])
        else:
            matcher.observe(layer, eam_row(ids, self._eamc.experts))

    def similarity(self) -> Floats:
        """[N] on the observed rows of the running pass, phase by phase as the paper has it.

        Before the first decode layer has run, what prefill is like must do.
        """
        matcher = self._matchers[self.phase]
        before = self._matchers.get("prefill")
        if matcher.layer < 0 and matcher.phase == "decode" and before is not None:
            return before.similarity()
        return matcher.similarity()

    def pair_similarity(self) -> Floats:
        """[N] on all that is known: the mean over prefill and decode."""
        parts = [m.similarity() for m in self._matchers.values() if m.layer >= 0]
        return np.mean(parts, 0) if parts else np.zeros(len(self._eamc), np.float32)

    def predict(self, similarity: Floats, matches: int, phase: Phase) -> Floats | None:
        """[L, E], rows sum to 1: what the matched entries routed in `phase`; None: no entry."""
        if not len(self._eamc):
            return None
        if matches == 1:
            places = [self._eamc.newest_of_best(similarity)]
        else:
            places = self._eamc.best(similarity, matches)
        return normalised(self._eamc.sum_of(places, phase))


class RunningRequests:
    """All requests that live, and those of the running pass."""

    def __init__(self, shape: RoutingShape, eamc: Eamc | None) -> None:
        self.eamc = eamc or Eamc(1, shape.layers, shape.experts)
        self._all: dict[int, RunningRequest] = {}
        self._rows: dict[int, NDArray[np.intp]] = {}  # of the running pass

    def begin_pass(self, rows: NDArray[np.int64], phase: Phase) -> None:
        requests = dict.fromkeys(rows.tolist())
        self._rows = {request: np.flatnonzero(rows == request) for request in requests}
        for request in requests:
            known = self._all.get(request)
            # A prompt after answers is a new turn of a conversation: a request of its own.
            if known is None or (phase != "decode" and known.decode_passes):
                self._all[request] = RunningRequest(self.eamc)
            self._all[request].begin_pass(phase)

    def routed(self, layer: int, ids: NDArray[np.integer[Any]]) -> None:
        for request, rows in self._rows.items():
            self._all[request].routed(layer, ids if len(rows) == len(ids) else ids[rows])

    def active(self) -> list[RunningRequest]:
        """Those of the running (or last) pass that still live."""
        return [self._all[request] for request in self._rows if request in self._all]

    def end(self, request: int) -> None:
        self._all.pop(request, None)
