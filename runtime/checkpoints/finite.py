"""Find NaN and infinity in weights before they are stored, and in logits before sampling.

The check of weights takes the minimum and the maximum in one pass. A NaN makes both NaN.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeinf.errors import Failure
from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint, SourceTensor
from moeinf.runtime.checkpoints.quantised.packed_integers import could_keep

_BFLOAT16 = float(torch.finfo(torch.bfloat16).max)
_FLOAT32 = float(torch.finfo(torch.float32).max)
# The largest magnitude of each format. Scales are float16: q8 has 127 steps of them, q4 has 8, q3
# 7 and q2 3, the minimum of q4k and q5k has 63, and q6k has 31 · 127.
_MOST = {
    "F32": _FLOAT32,
    "BF16": _BFLOAT16,
    "Q8": 65504.0 * 127,
    "Q4": 65504.0 * 8,
    "Q3": 65504.0 * 7,
    "Q2": 65504.0 * 3,
    **dict.fromkeys(("Q4K", "Q5K"), 65504.0 * 63),
    "Q6K": 65504.0 * 31 * 127,
    **dict.fromkeys(("MXFP4", "NVFP4"), _FLOAT32),  # kept, never made
}


class NotFiniteWeights(BadCheckpoint):
    """A weight is NaN or infinite, or overflows in the stored format."""

    code = "broken_weights"
    hint = "`moeinf pull --allow-nan`, which continues; the model may then fail at any token"


class NotFiniteLogits(Failure, RuntimeError):
    """The model computed NaN or infinity instead of logits."""

    code = "not_finite"
    hint = "`moeinf verify MODEL`, which checks its files, or another tag"


class WeightCheck:
    """The check of weights for NaN and infinity during a pull. It is thread-safe."""

    def __init__(self, allow: bool = False) -> None:
        """Create a check. With `allow` it notes the names of tensors instead of raising."""
        self._allow = allow
        self._lock = threading.Lock()
        self.found: list[str] = []  # names of tensors, in the order of discovery
        self.rounded: list[str] = []  # those whose codes could have been kept, but for their scales

    def again(self, broken: Sequence[str]) -> None:
        """Check the tensors that an earlier attempt found and wrote. Raises NotFiniteWeights."""
        if broken and not self._allow:
            raise NotFiniteWeights(f"{broken[0]!r} has NaN or infinity, and is written already")

    def look(self, tensor: SourceTensor, values: Tensor, form: str) -> None:
        """Check some values of a tensor that will be stored as `form`. Raises NotFiniteWeights.

        Kept codes are not shown to it, so a tensor that could keep them is noted as rounded.
        """
        if not values.numel():
            return
        if could_keep(tensor, form):
            self._note(tensor, self.rounded)
        least, largest = (float(x) for x in values.aminmax())
        if -_MOST[form] <= least and largest <= _MOST[form]:  # false for NaN
            return
        if not self._allow:
            finite = np.isfinite(least) and np.isfinite(largest)
            what = f"values beyond what {form} can hold" if finite else "NaN or infinity"
            raise NotFiniteWeights(f"{tensor.path.name}: {tensor.name!r} has {what}")
        self._note(tensor, self.found)

    def _note(self, tensor: SourceTensor, names: list[str]) -> None:
        with self._lock:
            if tensor.name not in names:
                names.append(tensor.name)


def check_logits(logits: NDArray[np.float32]) -> None:
    """Raise NotFiniteLogits unless all logits, [vocab] or [rows, vocab], are finite."""
    if not np.isfinite(logits).all():
        raise NotFiniteLogits(
            "the model computed NaN or infinity: its weights are broken, or its numbers overflow"
        )
