"""transformers with accelerate's offload: python -m benchmarks.peers.accelerate CHECKPOINT …

    --setting disk  --folder F    layers lie on disk and are brought when they run, as `device_map`
                                  with "disk" does it; embedding and head stay in memory
    --setting cpu                 weights lie in memory and are brought to the device that computes
                                  (`accelerate.cpu_offload`): the GPU where there is one
    --setting gpu  --device-bytes N   as many layers as N bytes hold stay on the GPU, the others are
                                  brought from memory (`device_map="auto"` with `max_memory`, which
                                  keeps room in N for the largest of them); without a GPU, to try it
                                  out: as many stay in memory, the others come from disk, --folder F

Knows torch, transformers and accelerate.
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
