"""Drop light experts that are not resident: a lossy choice, off by default.

It changes results, so it is off unless the user turns it on. It knows no tiers and no policies.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def without_light_misses(
    ids: Tensor, weights: Tensor, resident: NDArray[np.bool_], below: float
) -> Tensor:
    """Return ids [T, K] with -1 for each expert that is light and not resident.

    Light means w[t, k] / Σ_k w[t, k] < below, over the selected experts of row t. The largest
    weight of a row always stays. The other weights keep their values: the output loses the term of
    the dropped expert and nothing else.

    ids, weights, resident: [T, K] on the CPU. An id of -1 stays -1, and its weight counts as 0.
    """
    held = torch.where(ids >= 0, weights, torch.zeros_like(weights))
    light = held < below * held.sum(1, keepdim=True)
    light.scatter_(1, held.argmax(1, keepdim=True), False)
    return ids.masked_fill(light & ~torch.from_numpy(resident), -1)
