"""MoE-Infinity: python -m benchmarks.peers.moe_infinity CHECKPOINT --folder F --gpu-share 0.35 …

Knows torch and moe_infinity (github.com/EfficientMoE/MoE-Infinity): `MoE(checkpoint, config)` with
`offload_path` and `device_memory_ratio`, and its `generate`. Needs a GPU.
"""

from __future__ import annotations

import argparse

from moe_infinity import MoE

from benchmarks.peers.base import main
from benchmarks.peers.torch_talkers import Generating, best_device


def load(o: argparse.Namespace) -> Generating:
    config = {"offload_path": o.folder, "device_memory_ratio": o.gpu_share}
    return Generating(MoE(o.model, config).generate, best_device(), ("moe-infinity",))


if __name__ == "__main__":
    main(load)
