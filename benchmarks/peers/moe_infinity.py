"""MoE-Infinity (github.com/EfficientMoE/MoE-Infinity); needs a GPU.

Run: python -m benchmarks.peers.moe_infinity CHECKPOINT --folder F --device-bytes N …

Imports torch and moe_infinity: `MoE(checkpoint, config)` with `offload_path` and
`device_memory_ratio`, and its `generate`. The ratio is the part of the whole card's memory that
weights may take (DeviceMemoryPool::SetMemoryRatio). Newer versions have an engine of their own. It
takes 15 % of the card for its KV cache and streams no tokens, so it is turned off there and
transformers' `generate` is called.
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from typing import Any

import torch
from moe_infinity import MoE

from benchmarks.peers.base import main
from benchmarks.peers.torch_talkers import Generating, best_device


def load(o: argparse.Namespace) -> Generating:
    assert o.device_bytes is not None, "--device-bytes"
    _, total_bytes = torch.cuda.mem_get_info()
    ratio = min(1.0, o.device_bytes / total_bytes)
    config: dict[str, Any] = {"offload_path": o.folder, "device_memory_ratio": ratio}
    with suppress(ImportError):  # older versions lack this option
        from moe_infinity.utils.config import (  # pyright: ignore[reportMissingImports]
            ArcherConfig,
        )

        if "use_native_engine" in ArcherConfig.__dataclass_fields__:
            config["use_native_engine"] = False
    return Generating(MoE(o.model, config).generate, best_device(), ("moe-infinity",))


if __name__ == "__main__":
    main(load)
