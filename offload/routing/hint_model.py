"""Give a replay its next-layer hints: from the recording, or from a model of a gate.

A modelled gate keeps each expert that a layer chooses with probability `recall`. It adds experts
that the layer does not choose, drawn uniformly, until the share of correct ones is `precision`. The
order is random. Real gates are better: their wrong experts are often used soon, and their correct
ones come earlier in the order.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.routing.trace import Pass


class HintSource(Protocol):
    def of_pass(self, running: Pass) -> NDArray[np.int16] | None:
        """Return hints [L, T, H] as in `Pass.hints`; None: no hints in this pass."""
        ...


class RecordedHints:
    """The hints that the model's gates gave during the recording."""

    def of_pass(self, running: Pass) -> NDArray[np.int16] | None:
        return running.hints if running.phase == "decode" else None


class ModelledHints:
    """A gate of given recall and precision, for decode passes; reproducible by its seed."""

    def __init__(self, recall: float, precision: float, experts: int, seed: int = 0) -> None:
        if not (0 < recall <= 1 and 0 < precision <= 1):
            raise ValueError(
                f"recall {recall} and precision {precision} must be above 0, at most 1"
            )
        self._recall, self._wrong_per_right = recall, 1 / precision - 1
        self._experts = experts
        self._random = np.random.default_rng(seed)

    def of_pass(self, running: Pass) -> NDArray[np.int16] | None:
        if running.phase != "decode":
            return None
        random, (layers, rows, top_k) = self._random, running.ids.shape
        right = (running.ids >= 0) & (random.random(running.ids.shape) < self._recall)
        expected = right.sum(2) * self._wrong_per_right
        wrong = np.floor(expected + random.random(expected.shape)).astype(int)
        hints = np.full((layers, rows, top_k + int(wrong.max(initial=0))), -1, np.int16)
        for layer in range(layers):
            for row in range(rows):
                ids = running.ids[layer, row]
                others = np.setdiff1d(np.arange(self._experts), ids)
                missed = random.permutation(others)[: wrong[layer, row]]
                given = random.permutation(np.concatenate([ids[right[layer, row]], missed]))
                hints[layer, row, : len(given)] = given
        return hints
