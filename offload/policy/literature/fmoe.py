"""fMoE (FineMoE): search a store of past tokens' expert maps, by trajectory and by prompt.

Source: Yu et al., arXiv 2502.05370. An expert map is one token's gate probabilities [L, E]. Before
DISTANCE layers have run, the request with the most similar prompt predicts them; then the map whose
first layers are most similar predicts layer l + DISTANCE. The less similar it is, the more experts
are prefetched: the most probable ones whose sum reaches 1 - similarity, at least K. They are
read in the order of p / (layers ahead). Eviction takes the smallest p · frequency. A full store
replaces the map that is most similar to the new one.

Differences: maps have the K chosen probabilities only; the others are not told, and count as 0. The
"embedding" of a prompt is its expert histogram, because no hidden state is told. Without a prompt
it is that of the first token. It predicts the mean of a request's maps, which have one prompt.
EPSILON is added to p, so that frequency orders the experts of probability 0. A store of N maps
takes 4·N·L·E bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.policy.base import Prefetch, Setup, Weights
from moeinf.offload.policy.literature.foresight import shares_of
from moeinf.offload.policy.ranked import Ranked
from moeinf.offload.routing.eamc import Floats, normalised
from moeinf.offload.routing.trace import Phase

DISTANCE = 3
MAPS = 1000
MOST_BYTES = 64 << 20
REQUESTS = 128
EPSILON = 0.02


class Fmoe(Ranked):
    """Evict by probability times frequency, prefetch by the found map."""

    wants_weights = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        shape = setup.shape
        size = shape.layers, shape.experts
        self._most = max(1, min(MAPS, MOST_BYTES // (4 * setup.cells)))
        self._maps = np.zeros((setup.cells, self._most), np.float32)
        self._squares = np.zeros((shape.layers, self._most), np.float32)  # of layers 0 … l
        self._stored = 0
        self._prompts: dict[int, Floats] = {}  # per running request: the histogram of its prompt
        self._means: dict[int, Floats] = {}  # per running request: the sum of its maps
        self._past: list[tuple[Floats, Floats]] = []  # per past request: both, normalised
        self._chances = np.full(size, 1 / shape.experts, np.float32)
        self._uses = np.ones(setup.cells)
        self._prefetches: dict[int, list[tuple[float, int]]] = {}  # per layer: (p, cell)
        self._running: list[int] = []
        self._decoding = False

    def begin_pass(self, rows: NDArray[np.int64], phase: Phase) -> None:
        shape = self.setup.shape
        self._running, self._decoding = rows.tolist(), phase == "decode"
        for request in self._running:
            if request not in self._prompts:
                self._prompts[request] = np.zeros((shape.layers, shape.experts), np.float32)
                self._means[request] = np.zeros((shape.layers, shape.experts), np.float32)
        self._prefetches.clear()
        if self._decoding:
            self._dots = np.zeros((len(rows), self._stored), np.float32)
            self._square = np.zeros(len(rows), np.float32)
            self._token = np.zeros((len(rows), shape.layers, shape.experts), np.float32)
            self._by_prompt()

    def routed(
        self, layer: int, ids: NDArray[np.integer[Any]], weights: Weights | None = None
    ) -> None:
        experts = self.setup.shape.experts
        used = np.bincount(ids[ids >= 0], minlength=experts)
        self._uses[layer * experts : (layer + 1) * experts] += used > 0
        self._prefetches.pop(layer, None)
        for request in dict.fromkeys(self._running):
            if not (self._decoding and self._means[request].any()):
                mine = ids[np.equal(self._running, request)]
                self._prompts[request][layer] += np.bincount(mine[mine >= 0], minlength=experts)
        for row, chosen in enumerate(ids if self._decoding else ()):
            there = chosen[chosen >= 0]
            mix = None if weights is None else weights[row, chosen >= 0]
            self._token[row, layer, there] = shares_of(mix, there)
            self._follow(row, layer, there)
        target = layer + DISTANCE
        if self._decoding and self._stored and target < self.setup.shape.layers:
            score = self._scores(layer)
            best = score.argmax(1)
            found = self._maps[target * experts : (target + 1) * experts, best].mean(1)
            self._predict(target, found, float(score.max(1).mean()))
        row_keys = (self._chances[layer : target + 1] + EPSILON).ravel()
        cells = slice(layer * experts, layer * experts + len(row_keys))
        self.keys[cells] = row_keys * self._uses[cells]

    def end_pass(self, accepted: NDArray[np.bool_] | None) -> None:
        if not self._decoding:
            return
        score = self._scores(self.setup.shape.layers - 1)
        for row, request in enumerate(self._running):
            if accepted is None or accepted[row]:
                self._means[request] += self._token[row]
                self._store(self._token[row], score[row])

    def end_request(self, request: int) -> None:
        prompt, mean = self._prompts.pop(request, None), self._means.pop(request, None)
        if prompt is not None and mean is not None and mean.any():
            self._past.append((unit(prompt), normalised(mean)))
            del self._past[:-REQUESTS]

    def prefetch(self, most: int) -> Sequence[Prefetch]:
        found = [one for prefetches in self._prefetches.values() for one in prefetches]
        found.sort(key=lambda one: -one[0])
        used, top_k = self._chances.ravel(), self.setup.shape.top_k  # a gate's shares sum to 1
        return [
            Prefetch(cell, False, min(1.0, top_k * float(used[cell])))
            for _, cell in found
            if self.is_absent(cell)
        ][:most]

    def _follow(self, row: int, layer: int, chosen: NDArray[np.integer[Any]]) -> None:
        """Add a layer of a row's trajectory to its products with all maps."""
        mix = self._token[row, layer, chosen]
        cells = chosen.astype(np.intp) + layer * self.setup.shape.experts
        self._dots[row] += mix @ self._maps[cells, : self._dots.shape[1]]
        self._square[row] += mix @ mix

    def _scores(self, layer: int) -> Floats:
        """Return the cosine [T, N] of each row's trajectory so far to each map's."""
        squares = self._squares[layer, : self._dots.shape[1]]
        norms = np.sqrt(np.maximum(self._square[:, None] * squares, np.float32(1e-12)))
        return np.asarray(self._dots / norms, np.float32)

    def _by_prompt(self) -> None:
        """Predict the first layers from the request whose prompt is most similar."""
        if not self._past:
            return
        found, near = [], []
        prompts = np.stack([prompt.ravel() for prompt, _ in self._past])
        for request in dict.fromkeys(self._running):
            scores = prompts @ unit(self._prompts[request]).ravel()
            found.append(self._past[int(scores.argmax())][1])
            near.append(float(scores.max()))
        mean = np.mean(found, 0)
        for layer in range(min(DISTANCE, len(mean))):
            self._predict(layer, mean[layer], float(np.mean(near)))

    def _predict(self, layer: int, chances: Floats, similarity: float) -> None:
        experts, top_k = self.setup.shape.experts, self.setup.shape.top_k
        self._chances[layer] = chances
        order = np.argsort(-chances, kind="stable")
        enough = np.searchsorted(np.cumsum(chances[order]), 1 - min(1.0, max(0.0, similarity)))
        now = layer - DISTANCE
        self._prefetches[layer] = [
            (float(chances[expert]) / (layer - max(now, -1)), layer * experts + expert)
            for expert in order[: max(top_k, int(enough) + 1)].tolist()
            if chances[expert] > 0
        ]

    def _store(self, token: Floats, score: Floats) -> None:
        full = self._stored == self._most
        place = int(score.argmax()) if full and len(score) else self._stored % self._most
        self._stored += not full
        self._maps[:, place] = token.ravel()
        self._squares[:, place] = np.cumsum((token**2).sum(1))


def unit(matrix: Floats) -> Floats:
    """Return the matrix divided by its norm; zeros stay."""
    norm = float(np.sqrt((matrix**2).sum()))
    return matrix / np.float32(norm) if norm > 0 else matrix
