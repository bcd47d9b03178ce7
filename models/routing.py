"""From hidden states to the experts of each token and their weights.

Does not know what an expert computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class SoftmaxRouter:
    """Softmax over all experts, then the top K, in float32.

    weight        [E, D] in any dtype; widened for each use, which costs little beside an expert
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
        """x [T, D] -> ids [T, K] int64 and weights [T, K] float32, the heaviest first."""
        scores = functional.linear(x.float(), self.weight.float()).softmax(-1)  # [T, E]
        if self.groups is not None:
            scores = limit_to_groups(scores, *self.groups)
        weights, ids = scores.topk(self.top_k, dim=-1)  # [T, K] each
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids, weights * self.scale


def limit_to_groups(scores: Tensor, groups: int, kept: int) -> Tensor:
    """scores [T, E] with 0 outside the `kept` of `groups` equal groups whose best score is highest.

    DeepSeek-V2 (arXiv 2405.04434, section 2.2.2), topk_method group_limited_greedy.
    """
    grouped = torch.unflatten(scores, -1, (groups, -1))  # [T, G, E/G]
    best = grouped.amax(-1).topk(kept, dim=-1).indices  # [T, kept]
    mask = torch.zeros_like(grouped[..., 0]).scatter(1, best, 1.0)  # [T, G]
    return (grouped * mask[..., None]).flatten(1)
