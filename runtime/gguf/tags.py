"""Choose the tag that loses least of a GGUF file at nearly its size, and say what it costs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from moeinf.runtime.checkpoints.checkpoint import SourceTensor
from moeinf.runtime.checkpoints.ggml import PREFIX, bits_of, is_ggml, keeps
from moeinf.runtime.checkpoints.inventory import Inventory
from moeinf.runtime.sizes import format_bytes

_SAME = {"Q4_0": "q4", "Q8_0": "q8", "MXFP4": "mxfp4"}
_MOST_Q4_BITS = 5.0  # a mean: Q4_K_M has some matrices in Q6_K
_MOST_Q8_BITS = 9.0


def best_tag(experts: Iterable[SourceTensor]) -> str | None:
    """Return the tag for these tensors of experts, or None for the default of any model.

    One type that a tag stores without rounding takes that tag. Other quantised types take q4 up to
    5 bits per weight in the mean, and q8 above.
    """
    weights = _weights(experts)
    if len(weights) == 1 and (same := _SAME.get(next(iter(weights)).removeprefix(PREFIX))):
        return same
    total = sum(weights.values())
    mean = sum(bits_of(dtype) * count for dtype, count in weights.items()) / max(1, total)
    if not total or mean > _MOST_Q8_BITS:
        return None
    return "q4" if mean <= _MOST_Q4_BITS else "q8"


def describe_loss(inventory: Inventory, form: str) -> str | None:
    """Return a sentence on the quantised types of GGML that `form` does not keep; None for none."""
    pieces = [t for parts in inventory.experts.values() for t in parts.values()]
    tensors = [*pieces, *inventory.dense.values()]
    stored = [s for t in tensors for s in (t.recipe.stored if t.recipe else (t,))]
    lost = {t.dtype.removeprefix(PREFIX) for t in stored if is_ggml(t.dtype)} - {
        t.dtype.removeprefix(PREFIX) for t in pieces if keeps(t.dtype, form)
    }
    if not lost:
        return None
    verb = "widened" if form in ("BF16", "F32") else "converted"
    before = format_bytes(sum(t.size_bytes for t in stored))
    after = format_bytes(inventory.weight_bytes(form))
    return f"{', '.join(sorted(lost))}: {verb} to {form.lower()}, {before} become {after}"


def _weights(tensors: Iterable[SourceTensor]) -> Counter[str]:
    """Return the number of weights in matrices by dtype."""
    found: Counter[str] = Counter()
    for tensor in tensors:
        if len(tensor.shape) == 2:
            found[tensor.dtype] += math.prod(tensor.shape)
    return found
