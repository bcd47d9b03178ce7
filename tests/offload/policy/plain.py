"""The policy `adaptive` in plain Python and numpy, to be read and to be compared with.

It is not optimised. It follows native/policy/adaptive_core.h and native/policy/usage.h sentence by
sentence. Every float32 sum has the same order, so that its decisions are the same.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Callable

import numpy as np

from moeinf.offload.policy.adaptive import AdaptiveKnobs

F = np.float32
SURPRISE = (0.01, 0.03, 0.1, 0.3)


class PlainUsage:
    """The estimates [L, E], their weights, and the mixture `score`."""

    def __init__(self, layers: int, experts: int, knobs: AdaptiveKnobs) -> None:
        self.knobs, self.layers = knobs, layers
        self.decays = [F(decay) for decay in knobs.decays]
        count = len(self.decays) + 1
        self.shares = [np.zeros((layers, experts), F) for _ in range(count)]
        self.weights_by_age = [[F(1) / F(count)] * count for _ in range(6)]
        self.tokens = [0] * 6
        self.age = 0
        self.score = np.zeros((layers, experts), F)
        self.silent = 0  # so many layers, the first, score -1

    def begin_token(self, age: int) -> None:
        self.age = min(age.bit_length(), 5)
        self.tokens[self.age] += 1
        for layer in range(self.layers):
            self.mix(layer)

    def mix(self, layer: int) -> None:
        weights = self.weights_by_age[self.age]
        row = weights[0] * self.shares[0][layer]
        for weight, share in zip(weights[1:], self.shares[1:], strict=True):
            row = row + weight * share[layer]
        self.score[layer] = F(-1) if layer < self.silent else row

    def silence(self, layers: int) -> None:
        changed, self.silent = max(layers, self.silent), layers
        for layer in range(changed):
            self.mix(layer)

    def used(self, layer: int, experts: list[int]) -> None:
        if not experts:
            return
        weights = self.weights_by_age[self.age]
        posterior, known = [F(0)] * len(weights), 0
        for expert in experts:
            found = [
                w * share[layer, expert] for w, share in zip(weights, self.shares, strict=True)
            ]
            total = F(0)
            for part in found:
                total += part
            if total > 0:
                known += 1
                posterior = [p + part / total for p, part in zip(posterior, found, strict=True)]
        if known:
            step = F(max(self.knobs.step, 1 / (1 + self.tokens[self.age])) / self.layers)
            for j, old in enumerate(weights):
                weights[j] = max(old + step * (posterior[j] / F(known) - old), F(0.01))
        for decay, share in zip(self.decays, self.shares, strict=False):
            share[layer] *= decay
            share[layer, experts] += F(1) - decay
        self.mix(layer)

    def prompted(self, layer: int, counts: Counter[int], tokens: int) -> None:
        for decay, share in zip(self.decays, self.shares, strict=False):
            kept = F(float(decay) ** (tokens * self.knobs.prompt))
            used = np.array([counts[e] for e in range(share.shape[1])], F) / F(tokens)
            share[layer] = share[layer] * kept + (F(1) - kept) * used
        self.mix(layer)


class PlainAdaptive:
    """The interface of native.AdaptiveCore."""

    def __init__(
        self,
        layers: int,
        experts: int,
        keep_at_most: int,
        knobs: AdaptiveKnobs,
        encoder_layers: int = 0,
    ) -> None:
        self.encoder_layers = encoder_layers
        self.layers, self.experts, self.keep_at_most = layers, experts, keep_at_most
        self.knobs = knobs
        self.usage = PlainUsage(layers, experts, knobs)
        self.kept: set[int] = set()
        self.staged: list[int] = []
        self.hints: dict[int, list[int]] = {}
        self.hint_class: dict[int, int] = {}
        self.right, self.seen = [1.0] * 5, [1.0] * 5
        self.foreseen: dict[int, list[int]] = {}
        self.lookahead = [1.0, 1.0]  # right, seen
        self.insertions = 0
        self.decoding, self.layer = False, -1

    @property
    def past(self) -> np.ndarray:
        return self.usage.shares[-1]

    def score(self, cell: int) -> np.float32:
        return self.usage.score.ravel()[cell]

    def begin_encode(self) -> None:
        self.decoding, self.layer = False, -1
        self.usage.silence(0)

    def begin_prefill(self) -> None:
        self.decoding, self.layer = False, -1
        self.usage.silence(self.encoder_layers)

    def begin_decode(self, age: int) -> None:
        self.decoding, self.layer = True, -1
        self.usage.silence(self.encoder_layers)
        self.usage.begin_token(age)

    def routed(self, layer: int, ids: np.ndarray) -> None:
        self.layer = layer
        counts = Counter(int(e) for e in ids.ravel() if e >= 0)
        experts = list(counts) if len(ids) == 1 else sorted(counts)
        if self.decoding:
            self.usage.used(layer, experts)
        elif len(ids):
            self.usage.prompted(layer, counts, len(ids))
        cells = [layer * self.experts + e for e in experts]
        for cell in self.hints.pop(layer, []):
            kind = self.hint_class.pop(cell)
            self.right[kind] = self.right[kind] * 0.99 + (cell in cells)
            self.seen[kind] = self.seen[kind] * 0.99 + 1
        for cell in self.foreseen.pop(layer, []):
            right, seen = self.lookahead
            self.lookahead = [right * 0.99 + (cell in cells), seen * 0.99 + 1]
        for cell in cells:
            if cell in self.staged:
                self.settle(cell)

    def hinted(self, layer: int, ids: np.ndarray) -> None:
        for cell in self.hints.pop(layer, []):
            del self.hint_class[cell]
        ranked = dict.fromkeys(layer * self.experts + int(e) for e in ids.T.ravel() if e >= 0)
        self.hints[layer] = list(ranked)
        self.hint_class.update((c, bisect(SURPRISE, self.score(c))) for c in ranked)

    def end_pass(self) -> None:
        self.hints.clear()
        self.hint_class.clear()

    def admitted(self, cell: int) -> None:
        self.staged.append(cell)
        if cell not in self.hint_class:
            self.settle(cell)

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        def free(cell: int) -> bool:
            return cell not in self.hint_class and evictable(cell)

        kept = sorted(self.kept, key=lambda c: (self.score(c), c))
        ranks = (
            [c for c in sorted(self.staged, key=self.score) if free(c)],
            [c for c in kept if free(c)],
            [c for c in kept if evictable(c)],
            [c for c in self.staged if evictable(c)],
        )
        for cell in (rank[0] for rank in ranks if rank):
            self.kept.discard(cell)
            if cell in self.staged:
                self.staged.remove(cell)
            return cell
        return None

    def forget(self, cell: int) -> None:
        self.kept.discard(cell)
        if cell in self.staged:
            self.staged.remove(cell)

    def least(self) -> int | None:
        return min(self.kept, key=lambda c: (self.score(c), c), default=None)

    def deserves(self, cell: int, loser: int | None) -> bool:
        factor = F(1 + self.knobs.hysteresis)
        return loser is not None and bool(self.score(cell) > self.score(loser) * factor)

    def keeps(self, cell: int) -> bool:
        return len(self.kept) < self.keep_at_most or self.deserves(cell, self.least())

    def settle(self, cell: int) -> None:
        if len(self.kept) >= self.keep_at_most:
            loser = self.least()
            if loser is None or not self.deserves(cell, loser):
                return
            self.kept.remove(loser)
            self.staged.append(loser)
        self.staged.remove(cell)
        self.kept.add(cell)
        self.insertions += 1

    def wishes(self, most: int) -> list[tuple[int, bool, float]]:
        def absent(cell: int) -> bool:
            return cell not in self.kept and cell not in self.staged

        def by_score(cells: list[int]) -> list[int]:
            return sorted(cells, key=self.score, reverse=True)

        found: list[tuple[int, bool, float]] = []
        for layer in sorted(self.hints):
            if layer > self.layer:
                for cell in by_score([c for c in self.hints[layer] if absent(c)]):
                    kind = bisect(SURPRISE, self.score(cell))
                    right = self.right[kind] / self.seen[kind]
                    if right >= self.knobs.worth:
                        found.append((cell, True, right))
        if len(found) >= most:
            return found[:most]
        following = self.layer + 1
        first = 0 if following == self.layers else following * self.experts
        sure = [
            cell
            for cell in by_score(list(range(first, self.layers * self.experts)))
            if self.score(cell) >= F(self.knobs.sure)
            and absent(cell)
            and cell not in self.hint_class
        ]
        for cell in sorted(sure):  # judged in this order
            noted = self.foreseen.setdefault(cell // self.experts, [])
            if cell not in noted:
                noted.append(cell)
        if self.lookahead[0] / self.lookahead[1] >= float(F(self.knobs.sure)):
            found += [(cell, False, float(self.score(cell))) for cell in sure]
        return found[:most]
