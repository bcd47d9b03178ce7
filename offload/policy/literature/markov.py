"""Markov: which experts of layer l + 1 follow those of layer l, counted online.

Source: the affinity between layers of ExFlow (Yao et al., IPDPS 2024), counted instead of placed
on devices. together[l, a, b] counts the tokens that used a
in layer l and b in layer l + 1, with layer 0 of the next token after the last layer. The chance of
b is the mean of together[l, a] / uses[l, a] over the chosen a by gate weight, with PRIOR tokens of
b's own share added. From there the next layers follow by the same matrices, DEPTH in all. A row is
halved when it has counted MEMORY tokens, so that old use fades. The matrices take 4·L·E² bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.policy.base import Setup, Weights
from moeinf.offload.policy.literature.foresight import Foresight, shares_of
from moeinf.offload.routing.eamc import Floats
from moeinf.offload.routing.trace import Phase

DEPTH = 2
PRIOR = 8.0
MEMORY = 512.0


class Markov(Foresight):
    """Evict and prefetch by the chances that transitions between layers give."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        layers, experts = setup.shape.layers, setup.shape.experts
        self._together = np.zeros((layers, experts, experts), np.float32)
        self._uses = np.zeros((layers, experts), np.float32)
        self._before: tuple[int, NDArray[np.integer[Any]]] | None = None  # layer and ids [T, K]
        self._decoding = False

    def begin_pass(self, rows: NDArray[np.int64], phase: Phase) -> None:
        if not (self._decoding and phase == "decode" and self._has_rows(len(rows))):
            self._before = None
        self._decoding = phase == "decode"

    def routed(
        self, layer: int, ids: NDArray[np.integer[Any]], weights: Weights | None = None
    ) -> None:
        super().routed(layer, ids, weights)
        layers = self.setup.shape.layers
        if self._before is not None and (self._before[0] + 1) % layers == layer:
            self._learn(*self._before, ids)
        self._before = layer, ids
        if not self._decoding:
            return
        uses = np.zeros(self.setup.shape.experts, np.float32)  # of this layer, by gate weight
        for row, chosen in enumerate(ids):
            there = chosen >= 0
            mix = None if weights is None else weights[row, there]
            uses[chosen[there]] += shares_of(mix, chosen[there]) / np.float32(len(ids))
        for ahead in range(DEPTH):
            chances = uses @ self._chances((layer + ahead) % layers)
            self.tell((layer + ahead + 1) % layers, chances)
            uses = chances / max(float(chances.sum()), 1e-9)

    def _has_rows(self, rows: int) -> bool:
        return self._before is not None and len(self._before[1]) == rows

    def _chances(self, layer: int) -> Floats:
        """Return P(b of the layer after | a of `layer`), [E, E]; a row sums to about K."""
        prior = np.float32(PRIOR) * self.shares[(layer + 1) % len(self.shares)]
        seen = self._uses[layer][:, None] + np.float32(PRIOR)
        chances: Floats = (self._together[layer] + prior) / seen
        return chances

    def _learn(
        self, layer: int, before: NDArray[np.integer[Any]], after: NDArray[np.integer[Any]]
    ) -> None:
        experts, uses = self.setup.shape.experts, self._uses[layer]
        first, second = (marked(ids, experts) for ids in (before, after))
        self._together[layer] += first.T @ second
        uses += first.sum(0)
        full = uses > MEMORY
        if full.any():
            uses[full] /= 2
            self._together[layer, full] /= 2


def marked(ids: NDArray[np.integer[Any]], experts: int) -> Floats:
    """Return [T, E]: 1 where a row of ids [T, K] has the expert."""
    found = np.zeros((len(ids), experts + 1), np.float32)
    found[np.arange(len(ids))[:, None], ids] = 1  # -1 is the last column
    return found[:, :experts]
