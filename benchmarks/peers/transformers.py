"""transformers, with everything in memory.

Run: python -m benchmarks.peers.transformers CHECKPOINT …
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers.base import main
from benchmarks.peers.torch_talkers import CausalLm, best_device


def load(o: argparse.Namespace) -> CausalLm:
    torch.set_num_threads(o.threads)
    device = best_device()
    model = AutoModelForCausalLM.from_pretrained(o.model, dtype=torch.bfloat16)
    return CausalLm(model.to(device).eval(), device, ("transformers", "torch"))


if __name__ == "__main__":
    main(load)
