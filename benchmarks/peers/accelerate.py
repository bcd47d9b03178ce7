"""transformers with accelerate's offload.

Run: python -m benchmarks.peers.accelerate CHECKPOINT …

    --setting disk  --folder F    layers are on disk and loaded when they run (`device_map` with
                                  "disk"); embedding and head stay in memory
    --setting cpu                 weights are in memory and copied to the computing device
                                  (`accelerate.cpu_offload`): the GPU if there is one
    --setting gpu  --device-bytes N   layers stay on the GPU up to N bytes, the others are copied
                                  from memory (`device_map="auto"` with `max_memory`, which
                                  reserves room in N for the largest of them); without a GPU, for a
                                  trial: N bytes stay in memory, the others are on disk, --folder F

Imports torch, transformers and accelerate.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import cpu_offload
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.peers.base import main
from benchmarks.peers.torch_talkers import CausalLm, best_device, placed

_KEPT = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
_PACKAGES = ("transformers", "accelerate", "torch")
_ALL = 1 << 50  # more than any memory has


def load(o: argparse.Namespace) -> CausalLm:
    torch.set_num_threads(o.threads)
    device = best_device()
    if o.setting == "cpu":
        model = AutoModelForCausalLM.from_pretrained(o.model, dtype=torch.bfloat16)
        return CausalLm(cpu_offload(model.eval(), torch.device(device)), device, _PACKAGES)
    if o.setting == "gpu":
        assert o.device_bytes is not None, "--device-bytes"
        most: dict[int | str, int] = {"cpu": o.device_bytes}
        if device == "cuda":
            most = {0: o.device_bytes, "cpu": _ALL}
        model = AutoModelForCausalLM.from_pretrained(
            o.model, dtype=torch.bfloat16, device_map="auto", max_memory=most,
            offload_folder=o.folder,
        ).eval()  # fmt: skip
        return CausalLm(model, device, _PACKAGES, placed(model))
    layers = AutoConfig.from_pretrained(o.model).num_hidden_layers
    places: dict[str, str] = dict.fromkeys(_KEPT, device)
    places |= {f"model.layers.{layer}": "disk" for layer in range(layers)}
    model = AutoModelForCausalLM.from_pretrained(
        o.model, dtype=torch.bfloat16, device_map=places, offload_folder=o.folder
    )
    return CausalLm(model, device, _PACKAGES)


if __name__ == "__main__":
    main(load)
