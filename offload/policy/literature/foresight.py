"""The common part of predictors: their chances for the next layers, decayed counts elsewhere.

A cell's key is the probability that the next pass of its layer uses it. For layers that a predictor
has told about, it is the predictor's. For the others it is the share of recent tokens that used the
cell. Experts of told layers are prefetched from the probability WORTH on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.policy.base import Prefetch, Setup, Weights
from moeinf.offload.policy.ranked import Ranked
from moeinf.offload.routing.eamc import Floats

DECAY = 0.95  # per token
WORTH = 0.5


class Foresight(Ranked):
    """Evict the least probable cell; a subclass tells the chances of layers that come next."""

    wants_weights = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        shape = setup.shape
        self.keys = np.zeros(setup.cells, np.float32)
        self._rows = self.keys.reshape(shape.layers, shape.experts)
        self.shares = np.zeros((shape.layers, shape.experts), np.float32)
        self._told: dict[int, None] = {}  # layers, the next one first

    def routed(
        self, layer: int, ids: NDArray[np.integer[Any]], weights: Weights | None = None
    ) -> None:
        chosen = ids[ids >= 0]
        kept = DECAY ** len(ids)
        used = np.bincount(chosen, minlength=self.setup.shape.experts)
        self.shares[layer] *= kept
        self.shares[layer] += np.float32((1 - kept) / len(ids)) * used
        self._rows[layer] = self.shares[layer]
        self._told.pop(layer, None)

    def tell(self, layer: int, chances: Floats) -> None:
        """Set the probability of use [E] in the next pass of `layer`."""
        self._rows[layer] = chances
        self._told[layer] = None

    def prefetch(self, most: int) -> Sequence[Prefetch]:
        experts, prefetches = self.setup.shape.experts, list[Prefetch]()
        for layer in self._told:
            row = self._rows[layer]
            first = layer * experts
            likely = np.flatnonzero(row >= WORTH)
            for expert in likely[np.argsort(-row[likely], kind="stable")].tolist():
                if self.is_absent(first + expert):
                    prefetches.append(Prefetch(first + expert, False, min(1.0, float(row[expert]))))
        return prefetches[:most]


def shares_of(weights: Weights | None, ids: NDArray[np.integer[Any]]) -> Floats:
    """Return the weights of one row's ids [K], divided by their sum; equal shares without them."""
    if weights is None:
        return np.full(len(ids), 1 / max(1, len(ids)), np.float32)
    total = float(weights.sum())
    return weights / np.float32(total) if total > 0 else shares_of(None, ids)
