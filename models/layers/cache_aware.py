"""Route by logits and by what is cheap to use: a lossy choice, off by default.

Skliar et al., arXiv 2412.00099, "cache-prior": before the choice of the best K of a token, the
experts that are cheap get a bonus

    bonus · (running average over tokens of the layer's largest logit − its smallest)

The best J of the original order are always chosen: 1 where K is 2, else 2. The weights are those
that the router gives to the chosen experts, from its scores without the bonus.

Ours differs in two points. The average has the tokens that miss an expert, because a token that
misses none is routed as usual: the bonus cannot change its choice. Where a family chooses by other
scores than logits, the bonus and the range are of those scores.

The caller decides which experts are cheap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from moeinf.models.layers.moe import Router


class Judge(Protocol):
    """A router in two steps."""

    def judge(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map x [T, D] to the ranks and the scores of all experts, [T, E] f32 each.

        The K largest ranks are chosen; -inf is never chosen. `weigh` uses the scores.
        """
        ...

    def weigh(self, scores: Tensor, ids: Tensor) -> Tensor:
        """Return the weights [T, K] f32 of the chosen ids [T, K] from scores [T, E]."""
        ...


class CacheAwareRouter:
    """The router of one layer, which prefers cheap experts."""

    def __init__(
        self,
        exact: Router,
        judge: Judge,
        bonus: float,
        cheap: Callable[[], Tensor | None],
        replaced: Callable[[int], None],
    ) -> None:
        """Wrap a router.

        exact: gives the ids in descending order of rank. judge: the same router in two steps.
        cheap: called once per pass; returns [E] bool, or None for an exact choice.
        replaced: receives the number of chosen experts that `exact` had not chosen.
        """
        self._exact, self._judge, self._bonus = exact, judge, bonus
        self._cheap, self._replaced = cheap, replaced
        self._tokens, self._range = 0, 0.0  # in the average, and the average

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map x [T, D] to ids [T, K] int64 and weights [T, K] float32."""
        ids, weights = self._exact(x)
        cheap = self._cheap()
        if cheap is None or not cheap.any():
            return ids, weights
        rows = (~cheap[ids]).any(1).nonzero().flatten()  # the tokens that miss an expert
        if len(rows):
            before = ids[rows]
            ranks, scores = self._judge.judge(x[rows])
            self._average(ranks)
            found = choose(ranks, before, cheap, self._bonus * self._range)
            new = (found[:, :, None] != before[:, None, :]).all(2)  # [rows, K]
            self._replaced(int(new.sum()))
            changed = new.any(1)
            at = rows[changed]
            ids[at] = found[changed]
            weights[at] = self._judge.weigh(scores[changed], found[changed])
        return ids, weights

    def _average(self, ranks: Tensor) -> None:
        low = ranks.masked_fill(ranks == -torch.inf, torch.inf).amin(1)
        self._tokens += len(ranks)
        self._range += float((ranks.amax(1) - low - self._range).sum()) / self._tokens


def choose(ranks: Tensor, ids: Tensor, cheap: Tensor, bonus: float) -> Tensor:
    """Return the ids [T, K] with the best ranks [T, E], where cheap ones have `bonus` more.

    ids: [T, K], the exact choice, the best first; its first one or two stay. cheap: [E] bool.
    The result is in descending order of rank without the bonus.
    """
    kept = ids[:, : always_kept(ids.shape[1])]
    raised = (ranks + bonus * cheap).scatter(1, kept, torch.inf)
    found = raised.topk(ids.shape[1], dim=-1).indices
    order = ranks.gather(1, found).argsort(dim=-1, descending=True, stable=True)
    return found.gather(1, order)


def always_kept(top_k: int) -> int:
    """Return J, the number of a token's best experts that always stay."""
    return 1 if top_k <= 2 else 2
