"""ProMoE: a small learned predictor per layer looks STRIDE layers ahead.

Source: Song et al., arXiv 2410.22134. ProMoE trains a small network per layer offline that maps
the hidden state of layer l to the experts of layer l + STRIDE. Recordings have no hidden states,
and a policy sees none. So the input here is what the gates said about them:

    the experts that layer l has chosen, by gate weight        one logistic model
    the experts that the token before chose in the target      per target layer [3·E + 1, E]
    the hints of a gate on the hidden state, if there are any

The last is the engine's and comes one layer ahead, so it corrects the earlier prediction. The model
starts from decayed shares and learns by one step of gradient descent per token and layer. ProMoE's
transfers (chunks, early preemption, hits first) are the store's own way of reading.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.policy.base import Setup, Weights
from moeinf.offload.policy.literature.foresight import Foresight, shares_of
from moeinf.offload.routing.eamc import Floats
from moeinf.offload.routing.trace import Phase

STRIDE = 2
STEP = 0.2  # of the gradient
TRUST = 2.0  # the first logit of a hinted expert
_LEAST = np.float32(1e-3)


class ProMoe(Foresight):
    """Evict and prefetch by the learned chances of the layer STRIDE ahead."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        layers, experts = setup.shape.layers, setup.shape.experts
        self._weights = np.zeros((layers, 3 * experts, experts), np.float32)
        self._weights[:, 2 * experts :] = TRUST * np.eye(experts, dtype=np.float32)
        self._inputs: dict[int, list[tuple[NDArray[np.intp], Floats]]] = {}  # per target layer, row
        self._last: dict[int, NDArray[np.integer[Any]]] = {}  # per layer: its ids [T, K] before
        self._decoding = False

    def begin_pass(self, rows: NDArray[np.int64], phase: Phase) -> None:
        self._decoding = phase == "decode"
        if not self._decoding:
            self._inputs.clear()
            self._last.clear()

    def routed(
        self, layer: int, ids: NDArray[np.integer[Any]], weights: Weights | None = None
    ) -> None:
        if self._decoding:
            self._learn(layer, ids)
        super().routed(layer, ids, weights)
        self._last[layer] = ids[-1:] if not self._decoding else ids
        if not self._decoding:
            return
        target, inputs = (layer + STRIDE) % self.setup.shape.layers, []
        for row, chosen in enumerate(ids):
            there = chosen >= 0
            mix = None if weights is None else weights[row, there]
            before = self._before(target, row, layer)
            places = np.concatenate([chosen[there], before + self.setup.shape.experts])
            shares = shares_of(mix, chosen[there]) * np.float32(there.sum())
            inputs.append((places, np.append(shares, np.ones(len(before), np.float32))))
        self._inputs[target] = inputs
        self._tell(target)

    def hinted(self, layer: int, ids: NDArray[np.integer[Any]]) -> None:
        inputs = self._inputs.get(layer, [])
        if not self._decoding or len(inputs) != len(ids):
            return
        first, top_k = 2 * self.setup.shape.experts, self.setup.shape.top_k
        for row, hints in enumerate(ids):
            known = hints[hints >= 0][:top_k].astype(np.intp) + first
            places, values = inputs[row]
            inputs[row] = (
                np.append(places, known),
                np.append(values, np.ones(len(known), np.float32)),
            )
        self._tell(layer)

    def _before(self, target: int, row: int, layer: int) -> NDArray[np.intp]:
        """Return the experts that this row's last token chose in `target`."""
        last = self._last.get(target)
        if last is None or row >= len(last):
            return np.zeros(0, np.intp)
        found: NDArray[np.intp] = last[row][last[row] >= 0].astype(np.intp)
        return found

    def _tell(self, target: int) -> None:
        total = np.sum([self._chances(target, *one) for one in self._inputs[target]], 0)
        self.tell(target, np.minimum(total, np.float32(1)))

    def _chances(self, target: int, places: NDArray[np.intp], values: Floats) -> Floats:
        share = np.clip(self.shares[target], _LEAST, 1 - _LEAST)
        odds = share / (1 - share) * np.exp(values @ self._weights[target, places])
        chances: Floats = odds / (1 + odds)
        return chances

    def _learn(self, layer: int, ids: NDArray[np.integer[Any]]) -> None:
        inputs = self._inputs.pop(layer, [])
        if len(inputs) != len(ids):
            return
        for chosen, (places, values) in zip(ids, inputs, strict=True):
            error = -self._chances(layer, places, values)
            error[chosen[chosen >= 0]] += 1
            self._weights[layer, places] += np.float32(STEP / max(1, len(places))) * np.outer(
                values, error
            )
