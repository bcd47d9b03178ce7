"""Predict which experts a prompt will use from its n-grams, learned from past requests.

A past request is a pair (grams, EAM). Its EAM joins the nearest of C centroids. Each of its grams
is counted there. A prompt's *signature* is the mean of the centroids, weighted by their probability
given its grams (naive Bayes). Letters: L layers, E experts, C centroids, G grams.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.replicas.route_keys import Grams
from moeinf.offload.routing.eamc import normalised

MOST_CENTROIDS = 32
BUCKETS = 1 << 15  # into which gram hashes are folded
ALIKE = 0.9  # cosine from which two EAMs share a centroid while there is room for another
_PSEUDO_COUNT = 0.1  # of every gram in every centroid

Floats = NDArray[np.float32]


class Signatures:
    """Centroids of EAMs of one model, and the grams of the prompts that led to them."""

    def __init__(self, layers: int, experts: int, most: int = MOST_CENTROIDS) -> None:
        self.shape = (layers, experts)
        self._most = most
        self._sums = np.zeros((0, layers * experts), np.float32)  # of normalised EAMs
        self._requests = np.zeros(0, np.float32)
        self._grams = np.zeros((0, BUCKETS), np.float32)

    def __len__(self) -> int:
        """Return the number of centroids."""
        return len(self._sums)

    @property
    def centroids(self) -> Floats:
        """The centroids [C, L·E]; each layer of each sums to 1."""
        requests = np.maximum(self._requests, 1)[:, None]
        return (self._sums / requests).astype(np.float32)

    def learn(self, grams: Grams, eam: NDArray[np.number]) -> int:
        """Add a request with these grams [G] and EAM [L, E]; return its centroid."""
        one = normalised(eam).ravel()
        place = self._nearest(one)
        self._sums[place] += one
        self._requests[place] += 1
        self._grams[place, np.unique(grams % BUCKETS)] += 1
        return place

    def predict(self, grams: Grams) -> Floats | None:
        """Return the signature [L·E] of a prompt; None if no gram of it was seen before."""
        if not len(self):
            return None
        folded = np.unique(grams % BUCKETS)
        counts = self._grams[:, folded]
        seen = counts.any(0)
        if not seen.any():
            return None
        odds = np.log((counts[:, seen] + _PSEUDO_COUNT) / (self._requests[:, None] + 1)).sum(1)
        odds += np.log(self._requests)
        chances = np.exp(odds - odds.max())
        signature: Floats = (chances / chances.sum()).astype(np.float32) @ self.centroids
        return signature

    def _nearest(self, one: Floats) -> int:
        """Return the place of the centroid for a normalised EAM; a new one if none is alike."""
        if len(self):
            centroids = self.centroids
            lengths = np.linalg.norm(centroids, axis=1) * np.linalg.norm(one)
            cosines = centroids @ one / np.maximum(lengths, 1e-12)
            best = int(cosines.argmax())
            if cosines[best] >= ALIKE or len(self) == self._most:
                return best
        self._sums = np.concatenate([self._sums, np.zeros((1, one.size), np.float32)])
        self._requests = np.append(self._requests, np.float32(0))
        self._grams = np.concatenate([self._grams, np.zeros((1, BUCKETS), np.float32)])
        return len(self) - 1
