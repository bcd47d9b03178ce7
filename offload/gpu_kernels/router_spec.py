"""How a router chooses, in numbers: what a kernel has to know of it.

Does not know weights, nor who computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RouterKind:
    """The arithmetic of models/layers/routing.py.

    score         softmax       over all experts; of `groups`, those with the best score count
                  top_softmax   over the K best of the logits plus a bias
                  sigmoid       plus a bias that only chooses; of `groups`, those with the best two
                  mixer         of the best, among those close to it; then the same without it
    renormalise   divide the K weights by their sum
    scale         then multiply them
    groups        (all, kept)
    jitter        of the mixer: what is close
    """

    score: Literal["softmax", "top_softmax", "sigmoid", "mixer"]
    top_k: int
    renormalise: bool = False
    scale: float = 1.0
    groups: tuple[int, int] = (1, 1)
    jitter: float = 0.0
