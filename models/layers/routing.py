"""Routers: from hidden states to the experts of each token and their weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moeinf.models.config import require


@dataclass(frozen=True)
class SoftmaxRouter:
    """Softmax over all experts, then the top K, in float32.

    weight        [E, D] in any dtype; each use widens it, which costs little beside an expert
    renormalise   divide the K weights by their sum (mixtral; config key norm_topk_prob)
    scale         then multiply them (config key routed_scaling_factor)
    groups        (n_group, topk_group): only experts of the best groups count (DeepSeek-V2)
    """

    weight: Tensor
    top_k: int
    renormalise: bool
    scale: float = 1.0
    groups: tuple[int, int] | None = None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map x [T, D] to ids [T, K] int64 and weights [T, K] float32, the largest first."""
        scores = self.judge(x)[1]
        weights, ids = scores.topk(self.top_k, dim=-1)  # [T, K] each
        return ids, self._mixed(weights)

    def judge(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See cache_aware.Judge: the choice is by logits."""
        logits = functional.linear(x.float(), self.weight.float())  # [T, E]
        scores = logits.softmax(-1)
        if self.groups is not None:
            scores = limit_to_groups(scores, *self.groups)
            logits = logits.masked_fill(scores == 0, -torch.inf)
        return logits, scores

    def weigh(self, scores: Tensor, ids: Tensor) -> Tensor:
        """See cache_aware.Judge."""
        return self._mixed(scores.gather(1, ids))

    def _mixed(self, weights: Tensor) -> Tensor:
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * self.scale


@dataclass(frozen=True)
class NormedRouter:
    """A router of normed rows, whose weights have one more factor per expert (Gemma 4).

    norm          of the rows, for the router alone
    factors       [E] float32
    """

    norm: Callable[[Tensor], Tensor]
    inner: SoftmaxRouter
    factors: Tensor

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map x [T, D] to ids [T, K] int64 and weights [T, K] float32, in the order of choice."""
        ids, weights = self.inner(self.norm(x))
        return ids, weights * self.factors[ids]

    def judge(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See cache_aware.Judge."""
        return self.inner.judge(self.norm(x))

    def weigh(self, scores: Tensor, ids: Tensor) -> Tensor:
        """See cache_aware.Judge."""
        return self.inner.weigh(scores, ids) * self.factors[ids]


def only_expert(x: Tensor) -> tuple[Tensor, Tensor]:
    """Map x [T, D] to ids [T, 1], all 0, and weights [T, 1], all 1: a router of one expert."""
    ids = x.new_zeros((len(x), 1), dtype=torch.int64)
    return ids, torch.ones_like(ids, dtype=torch.float32)


@dataclass(frozen=True)
class TopSoftmaxRouter:
    """The top K of biased logits, then softmax over those K alone, in float32 (gpt-oss)."""

    weight: Tensor  # [E, D] in any dtype
    bias: Tensor  # [E]
    top_k: int

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map x [T, D] to ids [T, K] int64 and weights [T, K] float32, the largest first."""
        best, ids = self.judge(x)[0].topk(self.top_k, dim=-1)  # [T, K] each
        return ids, best.softmax(-1)

    def judge(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See cache_aware.Judge: the choice is by biased logits."""
        logits = functional.linear(x.float(), self.weight.float(), self.bias.float())  # [T, E]
        return logits, logits

    def weigh(self, scores: Tensor, ids: Tensor) -> Tensor:
        """See cache_aware.Judge."""
        return scores.gather(1, ids).softmax(-1)


def limit_to_groups(scores: Tensor, groups: int, kept: int) -> Tensor:
    """Return scores [T, E] with 0 outside the `kept` of `groups` equal groups with the best score.

    DeepSeek-V2 (arXiv 2405.04434, section 2.2.2), topk_method group_limited_greedy.
    """
    grouped = torch.unflatten(scores, -1, (groups, -1))  # [T, G, E/G]
    best = grouped.amax(-1).topk(kept, dim=-1).indices  # [T, kept]
    mask = torch.zeros_like(grouped[..., 0]).scatter(1, best, 1.0)  # [T, G]
    return (grouped * mask[..., None]).flatten(1)


@dataclass(frozen=True)
class SigmoidRouter:
    """Sigmoid scores in float32; the top K are chosen by score plus a learnt bias.

    DeepSeek-V3 (arXiv 2412.19437, section 2.1.2), topk_method noaux_tc. The weights are the scores
    without the bias.

    weight        [E, D] in any dtype
    bias          [E] e_score_correction_bias
    groups        (n_group, topk_group): only experts of the best groups count
    """

    weight: Tensor
    bias: Tensor
    top_k: int
    renormalise: bool
    scale: float = 1.0
    groups: tuple[int, int] | None = None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map x [T, D] to ids [T, K] int64 and weights [T, K] float32, in the order of choice."""
        choice, scores = self.judge(x)
        ids = choice.topk(self.top_k, dim=-1).indices  # [T, K]
        return ids, self.weigh(scores, ids)

    def judge(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See cache_aware.Judge: the choice is by score plus bias."""
        scores = self.scores(functional.linear(x.float(), self.weight.float()))  # [T, E]
        choice = scores + self.bias.float()
        if self.groups is not None:
            choice = drop_groups(choice, *self.groups)
        return choice, scores

    def scores(self, logits: Tensor) -> Tensor:
        """Map logits to scores [T, E]. Kernels replace this class only, no subclass."""
        return logits.sigmoid()

    def weigh(self, scores: Tensor, ids: Tensor) -> Tensor:
        """See cache_aware.Judge."""
        weights = scores.gather(1, ids)
        if self.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.scale


class BiasedSoftmaxRouter(SigmoidRouter):
    """The same with softmax scores over all experts (ERNIE-4.5, Mistral Small 4)."""

    def scores(self, logits: Tensor) -> Tensor:
        """Map logits to scores [T, E]."""
        return logits.softmax(-1)


class SqrtSoftplusRouter(SigmoidRouter):
    """The same with sqrt(softplus(logit)) as the score (DeepSeek-V4)."""

    def scores(self, logits: Tensor) -> Tensor:
        """Map logits to scores [T, E]."""
        return functional.softplus(logits).sqrt()


@dataclass(frozen=True)
class HashRouter:
    """A table that gives each token id its experts; only their weights are computed (DeepSeek-V4).

    inner         gives the scores; its choice and its bias have no use
    table         [vocab, K] of experts, in any integer type
    """

    inner: SigmoidRouter
    table: Tensor

    def __call__(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Map x [T, D] and token ids [T] to ids [T, K] int64 and weights [T, K] float32."""
        ids = self.table[tokens].long()
        return ids, self.inner.weigh(self.inner.judge(x)[1], ids)


def drop_groups(choice: Tensor, groups: int, kept: int) -> Tensor:
    """Return choice [T, E] with -inf outside the best `kept` of `groups` equal groups.

    DeepSeek-V3 (arXiv 2412.19437, section 2.1.2): a group's value is the sum of its best two.
    """
    grouped = torch.unflatten(choice, -1, (groups, -1))  # [T, G, E/G]
    worth = grouped.topk(2, dim=-1).values.sum(-1)  # [T, G]
    best = worth.topk(kept, dim=-1).indices  # [T, kept]
    dropped = torch.ones_like(worth, dtype=torch.bool).scatter(1, best, False)  # [T, G]
    return grouped.masked_fill(dropped[..., None], -torch.inf).flatten(1)


def require_groups(groups: int, kept: int, experts: int, top_k: int) -> None:
    """Raise ModelDataError unless `kept` of `groups` equal groups hold top_k experts."""
    require(experts % groups == 0, f"{experts} experts do not form {groups} groups")
    require(kept <= groups, f"topk_group must be at most {groups}, got {kept}")
    require(top_k <= experts // groups * kept, f"{kept} groups hold fewer than {top_k} experts")


@dataclass(frozen=True)
class SparseMixer:
    """Phi-3.5-MoE's choice of two experts (arXiv 2409.12136), as it is at inference, in float32.

    The best expert's weight is its softmax among the experts close to it. The second expert's
    weight is the same without the first. Close means at most 2 · jitter below the best, relative to
    the larger of the best logit and the magnitude of the expert's own. The two do not sum to 1.
    """

    weight: Tensor  # [E, D] in any dtype
    jitter: float  # router_jitter_noise

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map x [T, D] to ids [T, 2] int64 and weights [T, 2] float32, the best first."""
        logits = functional.linear(x.float(), self.weight.float())  # [T, E]
        first, first_weight = self._best(logits, logits)
        second, second_weight = self._best(logits.scatter(1, first, -torch.inf), logits)
        return torch.cat((first, second), 1), torch.cat((first_weight, second_weight), 1)

    def _best(self, candidates: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the best candidate's id and weight, [T, 1] each."""
        best, ids = candidates.max(-1, keepdim=True)
        distance = (best - logits) / torch.maximum(logits.abs(), best)
        close = candidates.masked_fill(distance > 2 * self.jitter, -torch.inf)
        return ids, close.softmax(-1).gather(1, ids)
