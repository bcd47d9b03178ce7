"""DeepSpeed's ZeRO inference.

Run: python -m benchmarks.peers.deepspeed CHECKPOINT --setting cpu|nvme …

Imports torch, transformers and deepspeed: stage 3 with parameters offloaded to memory, or to
`--folder` on a drive, as in DeepSpeedExamples/inference/huggingface/zero_inference. It computes on
a GPU if there is one. The drive's reader is compiled on first use, which takes minutes and needs
libaio's headers.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from benchmarks.peers.base import main
from benchmarks.peers.torch_talkers import Generating, best_device

_BUFFER_STEP = 1 << 20
# The variables that its launcher sets for a single process; without them it asks MPI.
_ALONE = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
}  # fmt: skip


def config_of(
    hidden: int, largest: int, batch: int, setting: str, folder: str | None
) -> dict[str, Any]:
    """Return DeepSpeed's configuration, with its example's numbers except the drive's buffers.

    A buffer holds the `largest` parameter and no more: five of the example's take 20 GiB of memory.
    """
    offload: dict[str, Any] = {"device": "cpu", "pin_memory": True}
    more: dict[str, Any] = {}
    if setting == "nvme":
        offload = {
            "device": "nvme",
            "pin_memory": True,
            "nvme_path": folder,
            "buffer_count": 5,
            "buffer_size": -(-largest // _BUFFER_STEP) * _BUFFER_STEP,
        }
        more["aio"] = {
            "block_size": 1 << 20,
            "queue_depth": 8,
            "thread_count": 1,
            "single_submit": False,
            "overlap_events": True,
        }
    return {
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": 2 * hidden * hidden,
            "stage3_param_persistence_threshold": hidden,
            "stage3_max_live_parameters": 2 * hidden * hidden,
            "offload_param": offload,
        },
        "train_batch_size": batch,
        **more,
    }


def load(o: argparse.Namespace) -> Generating:
    os.environ |= _ALONE
    deepspeed.init_distributed()
    shape = AutoConfig.from_pretrained(o.model)
    with torch.device("meta"):
        largest = max(p.numel() for p in AutoModelForCausalLM.from_config(shape).parameters())
    setting = "cpu" if o.setting == "default" else o.setting
    config = config_of(shape.hidden_size, largest, o.batch, setting, o.folder)
    told = HfDeepSpeedConfig(config)  # from_pretrained looks for a live one
    model = AutoModelForCausalLM.from_pretrained(o.model, dtype=torch.bfloat16)
    engine = deepspeed.initialize(model=model.eval(), config_params=config)[0]
    del told
    engine.module.eval()
    return Generating(engine.module.generate, best_device(), ("deepspeed", "transformers"))


if __name__ == "__main__":
    main(load)
