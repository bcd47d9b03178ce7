"""Describe the choice of a router as parameters for a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RouterKind:
    """Parameters of the arithmetic of models/layers/routing.py.

    score         softmax       over all experts; keeps the `groups` with the best single score
                  top_softmax   over the K best of the logits plus a bias
                  sigmoid       plus a bias, only for the choice; keeps `groups` by their best two
                  mixer         softmax of the best among those close to it; repeated without it
    renormalise   divide the K weights by their sum
    scale         then multiply them
    groups        (number of groups, number kept)
    jitter        of the mixer: the threshold of "close"
    """

    score: Literal["softmax", "top_softmax", "sigmoid", "mixer"]
    top_k: int
    renormalise: bool = False
    scale: float = 1.0
    groups: tuple[int, int] = (1, 1)
    jitter: float = 0.0
