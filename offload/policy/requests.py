"""Follow the routing of each running request, and predict the rest from past requests.

The policies that read the EAMC share this module.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.routing.eamc import Eamc, Floats, Matcher
from moeinf.offload.routing.trace import Phase, RoutingShape


class RunningRequest:
    """One request: a running match per phase."""

    def __init__(self, eamc: Eamc) -> None:
        self._eamc = eamc
        self._matchers: dict[Phase, Matcher] = {}
        self._found: tuple[Phase, int, list[int]] | None = None  # the inputs of _predicted
        self._predicted: Floats
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
        """Record the ids [t, K] that this request's rows chose in `layer`."""
        self._matchers[self.phase].observe(layer, ids)

    def similarity(self) -> Floats:
        """Return the similarity [N] on the observed rows of the running pass, per phase.

        The split by phase is that of the MoE-Infinity paper. Before the first decode layer has
        run, the similarity of prefill is the fallback.
        """
        matcher = self._matchers[self.phase]
        before = self._matchers.get("prefill")
        if matcher.layer < 0 and matcher.phase == "decode" and before is not None:
            return before.similarity()
        return matcher.similarity()

    def pair_similarity(self) -> Floats:
        """Return the similarity [N] on all observed rows: the mean over prefill and decode."""
        parts = [m.similarity() for m in self._matchers.values() if m.layer >= 0]
        total: Floats = sum(parts, np.zeros(len(self._eamc), np.float32))
        return total / np.float32(max(1, len(parts)))

    def predict(self, similarity: Floats, matches: int, phase: Phase) -> Floats | None:
        """Return the routing shares [L, E] of the matched entries in `phase`; rows sum to 1.

        None: the EAMC is empty. While the same entries match, the array is the same as before. The
        caller must not write to it.
        """
        if not len(self._eamc):
            return None
        found = (phase, self._eamc.changes, self._eamc.best(similarity, matches))
        if found != self._found:
            self._found = found
            self._predicted = self._eamc.shares_of(found[2], phase)
        return self._predicted


class RunningRequests:
    """All requests that have not ended, and those of the running pass."""

    def __init__(self, shape: RoutingShape, eamc: Eamc | None) -> None:
        # Not `eamc or …`: an empty EAMC is false, and fills while requests run.
        self.eamc = Eamc(1, shape.layers, shape.experts) if eamc is None else eamc
        self._all: dict[int, RunningRequest] = {}
        self._rows: dict[int, NDArray[np.intp]] = {}  # of the running pass

    def begin_pass(self, rows: NDArray[np.int64], phase: Phase) -> None:
        requests = dict.fromkeys(rows.tolist())
        self._rows = {request: np.flatnonzero(rows == request) for request in requests}
        for request in requests:
            known = self._all.get(request)
            # A prompt after decode is a new turn of a conversation, and counts as a new request.
            if known is None or (phase != "decode" and known.decode_passes):
                self._all[request] = RunningRequest(self.eamc)
            self._all[request].begin_pass(phase)

    def routed(self, layer: int, ids: NDArray[np.integer[Any]]) -> None:
        for request, rows in self._rows.items():
            self._all[request].routed(layer, ids if len(rows) == len(ids) else ids[rows])

    def active(self) -> list[RunningRequest]:
        """Return the requests of the running (or last) pass that have not ended."""
        return [self._all[request] for request in self._rows if request in self._all]

    def running(self) -> list[RunningRequest]:
        """Return all requests that have not ended, in order of their first pass."""
        return list(self._all.values())

    def end(self, request: int) -> None:
        self._all.pop(request, None)
