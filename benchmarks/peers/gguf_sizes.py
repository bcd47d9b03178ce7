"""The layers of a GGUF file whose experts are on a GPU, by the sizes of its tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(?:up|down|gate|gate_up)_exps\.")
_IN_RAM = "token_embd.weight"  # llama.cpp looks up rows in place: never on a GPU


def layers_below(sizes: Mapping[str, int], device_bytes: int) -> list[int]:
    """Return the layers, the first ones, whose experts stay in RAM.

    The last layers' experts fill device_bytes beside the dense weights. sizes: bytes by name.
    Raises SystemExit when the dense weights do not fit.
    """
    experts, dense = Counter[int](), 0
    for name, size in sizes.items():
        match = _EXPERTS.match(name)
        if match:
            experts[int(match[1])] += size
        elif name != _IN_RAM:
            dense += size
    left = device_bytes - dense
    if left < 0:
        raise SystemExit(f"{device_bytes} bytes have no room for {dense} of dense weights")
    below = sorted(experts)
    while below and experts[below[-1]] <= left:
        left -= experts[below.pop()]
    return below
