"""The worker that runs transformers with accelerate's disk offload.

    python -m benchmarks.accelerated CHECKPOINT OFFLOAD_FOLDER --layers 2 --threads 2

Knows torch, transformers and accelerate, not moeinf. All layers lie on disk and are brought when
they run, as `device_map` with "disk" does it; the embedding and the head stay in memory.
"""

from __future__ import annotations

import argparse
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.worker import serve

_IMPORTED_AT = time.monotonic()
_KEPT = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")


class AccelerateRunner:
    """See worker.Runner."""

    def __init__(self, checkpoint: Path, offload: Path, layers: int) -> None:
        places: dict[str, str] = dict.fromkeys(_KEPT, "cpu")
        places |= {f"model.layers.{layer}": "disk" for layer in range(layers)}
        self._model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.bfloat16, device_map=places, offload_folder=offload
        )
        self.reset()

    def reset(self) -> None:
        self._past: Any = None

    def prefill(self, tokens: list[int]) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            found = self._model(torch.tensor([tokens]), past_key_values=self._past, use_cache=True)
        self._past, self._logits = found.past_key_values, found.logits[0, -1]
        return time.perf_counter() - start

    def decode(self, tokens: list[int]) -> list[float]:
        return [self.prefill([token]) for token in tokens]

    def logits(self) -> list[float]:
        values: list[float] = self._logits.float().tolist()
        return values

    def about(self) -> dict[str, Any]:
        names = ("transformers", "accelerate", "torch")
        return {"version": ", ".join(f"{name} {version(name)}" for name in names)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("offload", type=Path)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    o = parser.parse_args()
    torch.set_num_threads(o.threads)
    runner = AccelerateRunner(o.checkpoint, o.offload, o.layers)
    serve(runner, {"imported_at": _IMPORTED_AT, "ready_at": time.monotonic()})


if __name__ == "__main__":
    main()
