"""Which layers of a GGUF file have their experts on a GPU, by the sizes of its tensors.

Does not know files.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(?:up|down|gate|gate_up)_exps\.")
_IN_RAM = "token_embd.weight"  # llama.cpp looks rows up where they are: never on a GPU


def layers_below(sizes: Mapping[str, int], device_bytes: int) -> list[int]:
    """Layers whose experts stay in RAM, the first ones: of the others as many as device_bytes hold
    beside the dense weights. sizes: bytes by name. SystemExit where those have no room."""
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
