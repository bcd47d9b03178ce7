"""How probably the next token uses each expert: several estimates, mixed by how well they did.

Does not know residency, slots or hints.

Each estimate is a matrix q [L, E] whose rows sum to about K, the experts a token uses:

    decayed      one per λ: q ← λ·q + (1 - λ)·(1 where the token used the expert)
    past         what the matched entries of the EAMC did while decoding, times K

The mixture p = Σ w_j·q_j has weights that an online form of EM fits to the routing as it comes:
after a layer, w moves a step towards each estimate's share of the probability that p gave to the
experts that were really chosen. So λ is chosen by recent success, and so is the trust in the EAMC.
Weights are kept apart by the age of the request: the past matters most in its first tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.eamc import Floats

_AGES = 6  # 0: the first decode token, then up to 1, 3, 7, 15, and more


@dataclass(frozen=True)
class UsageKnobs:
    """decays: λ per token of the decayed shares. step: how far a token moves the weights, at
    least. prompt: how many decode tokens a prompt token counts for in the decayed shares."""

    decays: tuple[float, ...] = (0.8, 0.95, 0.98)
    step: float = 0.05
    prompt: float = 1.0


class Usage:
    """The estimates, their weights, and the mixture `score` [L·E] that is current row by row."""

    def __init__(self, layers: int, experts: int, knobs: UsageKnobs) -> None:
        self._experts = experts
        self._layers = layers
        self._knobs = knobs
        self._count = len(knobs.decays) + 1
        self.shares = np.zeros((self._count, layers * experts), np.float32)
        self._decays = np.array(knobs.decays, np.float32)[:, None]
        self._weights = np.full((_AGES, self._count), 1 / self._count, np.float32)
        self._tokens = [0] * _AGES
        self.score: Floats = np.zeros(layers * experts, np.float32)
        self._age = 0

    @property
    def past(self) -> Floats:
        """[L·E], to be written by whoever knows the running requests."""
        found: Floats = self.shares[-1]
        return found

    @property
    def weights(self) -> Floats:
        """Of the mixture in use: the decays in order, past."""
        found: Floats = self._weights[self._age]
        return found

    def begin_token(self, age: int) -> None:
        """A decode pass of requests that have had `age` decode tokens starts."""
        self._age = min(age.bit_length(), _AGES - 1)
        self._tokens[self._age] += 1
        self.refresh()

    def refresh(self) -> None:
        """The mixture anew, after `past` was written."""
        np.dot(self.weights, self.shares, out=self.score)

    def used(self, layer: int, cells: list[int]) -> None:
        """One decode pass chose `cells` of `layer`."""
        if not cells:
            return
        row = slice(layer * self._experts, (layer + 1) * self._experts)
        weights = self._weights[self._age]
        shares = self.shares[:, row]
        chosen = np.array(cells) - row.start
        found = weights[:, None] * shares[:, chosen]  # [J, K]
        total = found.sum(0)
        known = total > 0
        if known.all():
            posterior = (found / total).mean(1)
        elif known.any():
            posterior = (found[:, known] / total[known]).mean(1)
        else:
            posterior = weights
        step = max(self._knobs.step, 1 / (1 + self._tokens[self._age])) / self._layers
        weights += step * (posterior - weights)
        np.maximum(weights, 0.01, out=weights)  # nobody is given up for good
        decayed = shares[: len(self._decays)]
        decayed *= self._decays
        decayed[:, chosen] += 1 - self._decays
        np.dot(weights, shares, out=self.score[row])

    def prompted(self, layer: int, counts: NDArray[np.number], tokens: int) -> None:
        """A prefill pass of `tokens` tokens chose the experts of `layer` so often, [E]."""
        row = slice(layer * self._experts, (layer + 1) * self._experts)
        kept = self._decays ** np.float32(tokens * self._knobs.prompt)
        decayed = self.shares[: len(self._decays), row]
        decayed *= kept
        decayed += (1 - kept) * (counts.astype(np.float32) / tokens)
        np.dot(self.weights, self.shares[:, row], out=self.score[row])
