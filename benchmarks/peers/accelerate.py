"""transformers with accelerate's offload: python -m benchmarks.peers.accelerate CHECKPOINT …

    --setting disk  --folder F    layers lie on disk and are brought when they run, as `device_map`
                                  with "disk" does it; embedding and head stay in memory
    --setting cpu                 weights lie in memory and are brought to the device that computes
                                  (`accelerate.cpu_offload`): the GPU where there is one

Knows torch, transformers and accelerate.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import cpu_offload
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.peers.base import main
from benchmarks.peers.torch_talkers import CausalLm, best_device

_KEPT = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
_PACKAGES = ("transformers", "accelerate", "torch")


def load(o: argparse.Namespace) -> CausalLm:
    torch.set_num_threads(o.threads)
    device = best_device()
    if o.setting == "cpu":
        model = AutoModelForCausalLM.from_pretrained(o.model, dtype=torch.bfloat16)
        return CausalLm(cpu_offload(model.eval(), torch.device(device)), device, _PACKAGES)
    layers = AutoConfig.from_pretrained(o.model).num_hidden_layers
    places: dict[str, str] = dict.fromkeys(_KEPT, device)
    places |= {f"model.layers.{layer}": "disk" for layer in range(layers)}
    model = AutoModelForCausalLM.from_pretrained(
        o.model, dtype=torch.bfloat16, device_map=places, offload_folder=o.folder
    )
    return CausalLm(model, device, _PACKAGES)


if __name__ == "__main__":
    main(load)
