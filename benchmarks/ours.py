"""The worker that runs moeinf, measured with the functions of `moeinf bench`.

Run: python -m benchmarks.ours HOME MODEL --threads 2 --context 1024
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as cli/entry.py does, before torch is loaded

from benchmarks.worker import forced_turn, serve
from moeinf.models.base import State
from moeinf.native import _native
from moeinf.offload.policy.names import DEFAULT_POLICY
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.jobs.bench import decode, prefill, token_bytes
from moeinf.runtime.library.library import Library
from moeinf.runtime.machine.memory import peak_rss_bytes
from moeinf.runtime.sizes import parse_memory

_IMPORTED_AT = time.monotonic()


class EngineRunner:
    """See worker.Runner."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.reset()

    def reset(self) -> None:
        self._state = self._engine.new_state()
        self._others: list[State] = []

    def turn(
        self, prompts: list[list[int]], answers: list[list[int]], limit_s: float
    ) -> dict[str, Any]:
        """Run one request per conversation, like a server; none is added to the EAMC."""
        engine, missing = self._engine, len(prompts) - 1 - len(self._others)
        self._others += [engine.new_state() for _ in range(missing)]
        states = [self._state, *self._others]
        requests = [engine.begin_request(state) for state in states]

        def first() -> None:
            for state, prompt in zip(states, prompts, strict=True):
                engine.extend(state, prompt)

        def step(column: list[int]) -> None:
            engine.step(list(zip(states, column, strict=True)))

        found = forced_turn(first, step, answers, limit_s)
        for request in requests:
            engine.end_request(request, counts=False)
        return found

    def prefill(self, tokens: list[int]) -> float:
        self._logits, seconds = prefill(self._engine, self._state, tokens)
        return seconds

    def decode(self, tokens: list[int]) -> list[float]:
        self._logits, seconds = decode(self._engine, self._state, self._logits, len(tokens), tokens)
        return seconds

    def logits(self) -> list[float]:
        return [float(value) for value in self._logits]

    def about(self) -> dict[str, Any]:
        stats, engine = self._engine.store.stats, self._engine
        return {
            "threads": engine.info.threads,
            "token_bytes": token_bytes(engine, self._state.length).total,
            "state_bytes": self._state.length * engine.info.manifest.kv_bytes_per_token,
            "dense_bytes": engine.info.manifest.dense_bytes,
            "expert_bytes": engine.info.manifest.expert_bytes,
            "loads": stats.loads,
            "decode_events": stats.decode_events,
            "decode_hits": stats.decode_hits,
            "resident": engine.store.resident,
            "stall_seconds": stats.stall_seconds,
            "decode_stall_seconds": stats.decode_stall_seconds,
            "decode_policy_seconds": stats.decode_policy_seconds,
            "hit_rate": stats.hit_rate,
            "slots": engine.info.slots,
            "rss_bytes": peak_rss_bytes(),
            "choices": engine.info.choices,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("home", type=Path)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--memory", type=parse_memory, default=parse_memory("100%"))
    parser.add_argument("--policy", default=DEFAULT_POLICY)
    parser.add_argument("--kernels", default="", help="the path, if not the fastest")
    parser.add_argument("--batch", type=int, default=1, help="conversations at once")
    parser.add_argument("--device-memory", type=parse_memory, help="of a GPU, which then computes")
    o = parser.parse_args()
    assert _native._use_kernels(o.kernels), o.kernels
    settings = Settings(o.home)
    manifest, folder = Library(settings).read(o.model)
    config = EngineConfig(
        memory=o.memory,
        context=o.context,
        threads=o.threads,
        policy=o.policy,
        parallel=o.batch,
        device="cpu" if o.device_memory is None else "cuda",
        device_memory=o.device_memory,
    )
    with Engine.open(manifest, folder, config, settings) as engine:
        greeting = {"imported_at": _IMPORTED_AT, "ready_at": time.monotonic()}
        serve(EngineRunner(engine), greeting)


if __name__ == "__main__":
    main()
