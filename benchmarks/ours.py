"""The worker that runs moeinf: python -m benchmarks.ours HOME MODEL --threads 2 --context 1024

Measures with the functions of `moeinf bench`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from benchmarks.worker import serve
from moeinf.offload.policy_names import DEFAULT_POLICY
from moeinf.runtime.bench import decode, prefill, token_bytes
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine import Engine
from moeinf.runtime.library import Library
from moeinf.runtime.memory import peak_rss_bytes
from moeinf.runtime.sizes import parse_memory

_IMPORTED_AT = time.monotonic()


class EngineRunner:
    """See worker.Runner."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.reset()

    def reset(self) -> None:
        self._state = self._engine.new_state()

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
            "threads": engine.placement.threads,
            "token_bytes": token_bytes(engine, self._state.length).total,
            "dense_bytes": engine.manifest.dense_bytes,
            "expert_bytes": engine.manifest.expert_layout.data_bytes,
            "loads": stats.loads,
            "resident": engine.store.resident,
            "stall_seconds": stats.stall_seconds,
            "hit_rate": stats.hit_rate,
            "slots": engine.placement.slots,
            "rss_bytes": peak_rss_bytes(),
            "choices": engine.choices,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("home", type=Path)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--memory", type=parse_memory, default=parse_memory("100%"))
    parser.add_argument("--policy", default=DEFAULT_POLICY)
    o = parser.parse_args()
    settings = Settings(o.home)
    manifest, folder = Library(settings).read(o.model)
    config = EngineConfig(memory=o.memory, context=o.context, threads=o.threads, policy=o.policy)
    with Engine(manifest, folder, config, settings) as engine:
        greeting = {"imported_at": _IMPORTED_AT, "ready_at": time.monotonic()}
        serve(EngineRunner(engine), greeting)


if __name__ == "__main__":
    main()
