"""The paper's first version: one EAM per sequence, prompt and answer together.

Source: MoE-Infinity, arXiv 2401.14361 v1 and v2. After each layer the sequence's EAM is compared
with those of the past, whole matrices: the mean over layers of the rows' cosines. The closest one
is prefetched by (P + ε)·(1 - (i - l)/L). Eviction looks at the running sequence alone: the smallest
(share of its tokens + ε)·(1 - i/L). The third version (`eamc`) keeps prompt and answer apart,
matches the observed rows only, and evicts by the matched past.

Differences: the collection is that of all policies, which adds finished requests one by one, where
v1 clusters a data set beforehand. Several sequences at once are summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeinf.native import EamcCore
from moeinf.offload.policy.base import Evictable, Passive, Prefetch, Setup, Weights
from moeinf.offload.routing.eamc import Eamc, Floats, normalised
from moeinf.offload.routing.trace import Phase

EPSILON = 1e-3


class Past:
    """The EAMs [L, E, N] of finished sequences, and the norms [L, N] of their rows."""

    def __init__(self, eamc: Eamc) -> None:
        self._eamc, self._changes = eamc, -1
        self.refresh()

    def refresh(self) -> None:
        """Read the collection again if it has changed."""
        if self._changes != self._eamc.changes:
            self._changes = self._eamc.changes
            self.eams = self._eamc.counts("prefill") + self._eamc.counts("decode")
            self.norms = np.maximum(np.sqrt((self.eams**2).sum(1)), np.float32(1e-9))


class RunningSequence:
    """The EAM of one sequence, and its cosine to each past row."""

    def __init__(self, past: Past) -> None:
        self._past, self._seen = past, past.eams
        self.eam = np.zeros(past.eams.shape[:2], np.float32)
        self._dots = np.zeros((len(self.eam), past.eams.shape[2]), np.float32)
        self._cosines = self._dots.copy()
        self._total = self._cosines.sum(0)

    def routed(self, layer: int, ids: NDArray[np.integer[Any]]) -> None:
        if self._seen is not self._past.eams:  # another sequence has ended
            self.__dict__ |= RunningSequence(self._past).__dict__ | {"eam": self.eam}
            for row in np.flatnonzero(self.eam.any(1)).tolist():
                self._match(row, self.eam[row] @ self._seen[row])
        chosen = ids[ids >= 0]
        np.add.at(self.eam[layer], chosen, 1)
        self._match(layer, self._dots[layer] + self._seen[layer][chosen].sum(0))

    def _match(self, layer: int, dots: Floats) -> None:
        row = self.eam[layer]
        self._dots[layer] = dots
        self._total -= self._cosines[layer]
        norm = np.sqrt(max(row @ row, np.float32(1e-9)))  # no row may have chosen here
        self._cosines[layer] = dots / (self._past.norms[layer] * norm)
        self._total += self._cosines[layer]

    def closest(self) -> int:
        """Return the place of the most similar past sequence; the first among equals."""
        return int(np.rint(self._total * 1e5).argmax())


class EamcV1(Passive):
    """Evict by the running sequence, prefetch by the closest past one."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        shape = setup.shape
        eamc = Eamc(1, shape.layers, shape.experts) if setup.eamc is None else setup.eamc
        self._past = Past(eamc)
        self._sequences: dict[int, RunningSequence] = {}
        self._rows: dict[int, NDArray[np.bool_]] = {}  # of the running pass
        # The same keys and prefetches as in `eamc`, from two predictions.
        self._eviction, self._ahead = (
            EamcCore(shape.layers, shape.experts, setup.slots, epsilon=EPSILON,
                     encoder_layers=shape.encoder_layers)
            for _ in range(2)
        )  # fmt: skip
        self._found: list[int] = []

    def begin_pass(self, rows: NDArray[np.int64], phase: Phase) -> None:
        self._past.refresh()
        self._rows = {request: rows == request for request in dict.fromkeys(rows.tolist())}
        for request in self._rows:
            if request not in self._sequences:
                self._sequences[request] = RunningSequence(self._past)
        for core in (self._eviction, self._ahead):
            core.begin_pass(phase == "encode")

    def routed(
        self, layer: int, ids: NDArray[np.integer[Any]], weights: Weights | None = None
    ) -> None:
        self._eviction.routed(layer, ids)
        self._ahead.routed(layer, ids)
        active = []
        for request, rows in self._rows.items():
            if request in self._sequences:
                active.append(self._sequences[request])
                active[-1].routed(layer, ids[rows])
        if not active:
            return
        self._eviction.predict(normalised(np.sum([one.eam for one in active], 0)))
        if self._past.eams.shape[2]:
            found = [one.closest() for one in active]
            if found != self._found or layer == 0:
                self._found = found
                self._ahead.predict(normalised(self._past.eams[:, :, found].sum(2)))

    def end_request(self, request: int) -> None:
        self._sequences.pop(request, None)

    def resize(self, slots: int) -> None:
        super().resize(slots)
        for core in (self._eviction, self._ahead):
            core.resize(slots)

    def admitted(self, cell: int) -> None:
        self.insertions += 1
        self._eviction.admitted(cell)
        self._ahead.admitted(cell)

    def victim(self, evictable: Evictable) -> int | None:
        cell = self._eviction.victim(evictable)
        if cell is not None:
            self._ahead.forget(cell)
        return cell

    def forget(self, cells: Iterable[int]) -> None:
        for cell in cells:
            self._eviction.forget(cell)
            self._ahead.forget(cell)

    def prefetch(self, most: int) -> Sequence[Prefetch]:
        if not self._past.eams.shape[2]:
            return ()
        return [Prefetch(cell, False) for cell in self._ahead.wishes(most)]
