"""vLLM: python -m benchmarks.peers.vllm CHECKPOINT --gpu-share 0.35 …

Knows vllm: `LLMEngine` with requests of token ids, stepped by hand, and `cpu_offload_gb` for what
shall not lie on the GPU. Prefix caching keeps a conversation's earlier turns.
"""

from __future__ import annotations

import argparse
import itertools
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vllm import EngineArgs, LLMEngine, SamplingParams

from benchmarks.peers.base import main, streamed


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
        most = len(answers[0]) + 1  # the first comes of the prompt
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
        return {"version": f"vllm {version('vllm')}"}


def load(o: argparse.Namespace) -> VllmTalker:
    weights = sum(file.stat().st_size for file in Path(o.model).glob("*.safetensors"))
    arguments = EngineArgs(
        model=o.model,
        dtype="bfloat16",
        max_model_len=o.context,
        max_num_seqs=o.batch,
        cpu_offload_gb=(1 - o.gpu_share) * weights / (1 << 30),
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
    )
    return VllmTalker(LLMEngine.from_engine_args(arguments))


if __name__ == "__main__":
    main(load)
