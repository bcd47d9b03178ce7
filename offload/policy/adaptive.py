"""The default policy: keeps what is probably used next, whatever tells so.

Does not know bytes, time or threads. usage.py says how probable the use of each expert is.

Admission: a slot is *kept* or *staged*. What has been read is staged first. It takes over the slot
of the least probable kept expert only if it is more probable by the factor 1 + ε; the two change
places, nothing is copied, and the loser stays usable until its slot is needed. Victims are staged
ones, the least probable first. So a miss that will not come again costs one read and displaces
nobody.

Reading ahead: what a gate hints for a later layer, and lookahead by probability, each only while
it is more probably right than wrong. Hints are judged by what is routed afterwards, whether or
not they were acted upon. Hinted experts are not evicted before their layer has run.

An encoder's experts leave first once it has run; they are judged by probability again when the next
source is read.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.policy.base import Evictable, Passive, Setup, Wish, chosen_cells, lowest
from moeinf.offload.policy.requests import RunningRequests
from moeinf.offload.policy.usage import Usage, UsageKnobs
from moeinf.offload.trace import Phase, eam_row

_MEMORY = 0.99  # how long the success of hints is remembered: about a hundred hints
_SURPRISE = (0.01, 0.03, 0.1, 0.3)  # hints are judged by how probable their expert was anyway
_NONE = np.float32(np.inf)
_OVER = -1.0  # of an encoder's experts once it has run: less than any probability
_SURE = 0.5  # lookahead reads only what is likelier used than not: its misses cost as much


@dataclass(frozen=True)
class AdaptiveKnobs:
    """hysteresis: ε. matches: EAMC entries that are averaged. worth: the probability from which a
    hinted read is worth its while. usage: of the estimates."""

    hysteresis: float = 0.25
    matches: int = 5
    worth: float = 0.25
    usage: UsageKnobs = field(default_factory=UsageKnobs)


class Adaptive(Passive):
    """Evicts by probability of use, admits with hysteresis, reads ahead what is worth it."""

    def __init__(self, setup: Setup, knobs: AdaptiveKnobs | None = None) -> None:
        super().__init__(setup)
        self._knobs = knobs or AdaptiveKnobs()
        shape = setup.shape
        self._experts = shape.experts
        self._encoder_cells = shape.encoder_layers * shape.experts
        self.usage = Usage(shape.layers, shape.experts, self._knobs.usage)
        self._requests = RunningRequests(shape, setup.eamc)
        self._keep_at_most = setup.slots - min(shape.top_k, max(1, setup.slots // 4))
        self._kept = 0
        self._is_kept = np.zeros(setup.cells, np.bool_)
        self._keys = np.full(setup.cells, _NONE)  # score of kept cells, infinite for the others
        self._staged: dict[int, None] = {}  # the oldest first
        self._phase: Phase = "prefill"
        self._layer = -1
        self._hints: dict[int, list[int]] = {}  # layer -> cells, the surest first
        self._hinted: set[int] = set()
        self._hint_right = [1.0] * (len(_SURPRISE) + 1)
        self._hint_seen = [1.0] * (len(_SURPRISE) + 1)
        self._hint_class: dict[int, int] = {}

    def hint_precision(self, score: float) -> float:
        """Share of recent hints that came true, among those of experts about as probable."""
        kind = bisect(_SURPRISE, score)
        return self._hint_right[kind] / self._hint_seen[kind]

    def begin_pass(self, rows: NDArray[np.int64], phase: Phase) -> None:
        self._requests.begin_pass(rows, phase)
        self._phase, self._layer = phase, -1
        if phase == "decode":
            active = self._requests.active()
            age = min(request.decode_passes for request in active) - 1
            self._write_predictions()
            self.usage.begin_token(age)
        elif self._encoder_cells:
            self.usage.refresh()  # the encoder counts again, or no longer
        if self._encoder_cells and phase != "encode":
            self.usage.score[: self._encoder_cells] = _OVER
        if self._encoder_cells or phase == "decode":
            self._refresh()

    def routed(self, layer: int, ids: NDArray[np.integer[Any]]) -> None:
        self._layer = layer
        self._requests.routed(layer, ids)
        cells = chosen_cells(layer, ids, self._experts)
        if self._phase == "decode":
            self.usage.used(layer, cells)
        else:
            self.usage.prompted(layer, eam_row(ids, self._experts), len(ids))
        self._judge_hints(layer, cells)
        row = slice(layer * self._experts, (layer + 1) * self._experts)
        self._keys[row] = np.where(self._is_kept[row], self.usage.score[row], _NONE)
        for cell in cells:
            if cell in self._staged:
                self._settle(cell)

    def hinted(self, layer: int, ids: NDArray[np.integer[Any]]) -> None:
        first = layer * self._experts
        by_rank = ids.T.ravel().tolist()  # every row's surest first
        cells = list(dict.fromkeys(first + e for e in by_rank if e >= 0))
        self._hints[layer] = cells
        score = self.usage.score
        self._hint_class.update((cell, bisect(_SURPRISE, score[cell])) for cell in cells)
        self._hinted.update(cells)

    def end_pass(self, accepted: NDArray[np.bool_] | None) -> None:
        self._hints.clear()
        self._hinted.clear()
        self._hint_class.clear()

    def end_request(self, request: int) -> None:
        self._requests.end(request)

    def admitted(self, cell: int) -> None:
        self._staged[cell] = None
        if cell not in self._hinted:  # else it is judged when its layer has run
            self._settle(cell)

    def victim(self, evictable: Evictable) -> int | None:
        hinted = self._hinted
        score = self.usage.score
        free = [cell for cell in self._staged if cell not in hinted and evictable(cell)]
        if free:
            cell = min(free, key=score.__getitem__)
            del self._staged[cell]
            return cell
        kept = lowest(self._keys, lambda c: c not in hinted and evictable(c))
        if kept is None:
            kept = lowest(self._keys, evictable)
        if kept is not None:
            self._unkeep(kept)
            return kept
        for cell in self._staged:
            if evictable(cell):
                del self._staged[cell]
                return cell
        return None

    def keeps(self, cell: int) -> bool:
        if self._kept < self._keep_at_most:
            return True
        least = self._keys.min()
        return bool(self.usage.score[cell] > least * (1 + self._knobs.hysteresis))

    def prefetch(self, most: int) -> Sequence[Wish]:
        wishes: list[Wish] = []
        score = self.usage.score
        for layer in sorted(self._hints):
            if layer > self._layer:
                absent = [cell for cell in self._hints[layer] if not self._has(cell)]
                absent.sort(key=score.__getitem__, reverse=True)
                worth = self._knobs.worth
                wishes += [Wish(c, True) for c in absent if self.hint_precision(score[c]) >= worth]
        return wishes[:most] + self._lookahead(most - len(wishes))

    def _lookahead(self, most: int) -> list[Wish]:
        """Absent experts of later layers, or after the last layer of all, that are probable."""
        last = self._layer == self.setup.shape.layers - 1
        first = 0 if last else (self._layer + 1) * self._experts
        score = self.usage.score
        probable = first + np.flatnonzero(score[first:] >= _SURE)
        absent = [cell for cell in probable.tolist() if not self._has(cell)]
        absent.sort(key=score.__getitem__, reverse=True)
        return [Wish(cell, False) for cell in absent[: max(most, 0)] if cell not in self._hinted]

    def _has(self, cell: int) -> bool:
        return bool(self._is_kept[cell]) or cell in self._staged

    def _settle(self, cell: int) -> None:
        """A staged cell is kept from now on if it deserves it."""
        if self._kept >= self._keep_at_most:
            loser = int(self._keys.argmin())
            least = self._keys[loser]
            if not self.usage.score[cell] > least * (1 + self._knobs.hysteresis):
                return
            self._unkeep(loser)
            self._staged[loser] = None
        del self._staged[cell]
        self.insertions += 1
        self._is_kept[cell] = True
        self._keys[cell] = self.usage.score[cell]
        self._kept += 1

    def _unkeep(self, cell: int) -> None:
        self._is_kept[cell] = False
        self._keys[cell] = _NONE
        self._kept -= 1

    def _refresh(self) -> None:
        np.copyto(self._keys, self.usage.score)
        self._keys[~self._is_kept] = _NONE

    def _judge_hints(self, layer: int, cells: list[int]) -> None:
        hinted = self._hints.pop(layer, None)
        if hinted:
            chosen = set(cells)
            for cell in hinted:
                kind = self._hint_class.pop(cell)
                self._hint_right[kind] = self._hint_right[kind] * _MEMORY + (cell in chosen)
                self._hint_seen[kind] = self._hint_seen[kind] * _MEMORY + 1
            self._hinted.difference_update(hinted)

    def _write_predictions(self) -> None:
        """Before a decode pass: what past requests say about the running ones."""
        usage, shape = self.usage, self.setup.shape
        active = self._requests.active()
        past = usage.past
        past.fill(0)
        for request in active:
            predicted = request.predict(request.pair_similarity(), self._knobs.matches, "decode")
            if predicted is not None:
                past += predicted.ravel() * shape.top_k
        if len(active) > 1:
            np.minimum(past, 1, out=past)
