"""python -m benchmarks.demo: the embedded model at a share of its memory, by policy, cold and warm.

Its routing is real: the model was trained. Held-out exercises come in fixed random order. The
first half fills the EAMC of *warm* runs, the second half is measured:

    policies   bytes read and stall per decoded token over all of the second half, one process
    starts     the same for single answers of at most 16 tokens, each in an engine just loaded
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moeinf.cli.commands.models.pull import ensure
from moeinf.cli.output import Output
from moeinf.offload.store.stats import StoreStats
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.chat import Conversation
from moeinf.runtime.jobs.bench import machine
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from moeinf.runtime.requests import Limits
from moeinf.runtime.sampling.sampler import SamplingOptions
from moeinf.runtime.sizes import parse_memory

_GREEDY = SamplingOptions(temperature=0)
_START_TOKENS = 16
Result = dict[str, Any]


def prompts(count: int) -> list[str]:
    """Return held-out exercises in a fixed random order."""
    lines = (DEMO_CHECKPOINT / "heldout.jsonl").read_text().splitlines()
    chosen = random.Random(0).sample(lines, min(count, len(lines)))
    return [json.loads(line)["prompt"] for line in chosen]


class Home:
    """A home of its own for one way of running the demo, with its own EAMC."""

    def __init__(self, folder: Path, share: str, eamc_of: Home | None = None) -> None:
        """Create the home. eamc_of: the home whose EAMC is copied into this one."""
        self.settings = Settings(folder)
        self._model = ensure("demo:bf16", self.settings, Output(quiet=True))
        self._state = self.settings.state_of(self._model[0].model)
        self._begins_with = eamc_of
        self._memory = parse_memory(share)
        self._begin()

    def run(self, items: Sequence[str], policy: str, most: int = 128) -> StoreStats:
        """Answer items in one engine; return the counters of its store."""
        config = EngineConfig(memory=self._memory, policy=policy, threads=1)
        with Engine.open(*self._model, config, self.settings) as engine:
            for item in items:
                for _ in Conversation(engine).ask(item, _GREEDY, Limits(max_tokens=most)):
                    pass
            return engine.store.stats

    def starts(self, items: Sequence[str], policy: str) -> list[StoreStats]:
        """Answer each item in a new engine, which begins with the home's first EAMC."""
        found = []
        for item in items:
            self._begin()
            found.append(self.run([item], policy, _START_TOKENS))
        return found

    def _begin(self) -> None:
        shutil.rmtree(self._state, ignore_errors=True)
        if self._begins_with is not None:
            shutil.copytree(self._begins_with._state, self._state)


def summary(runs: Sequence[StoreStats], top_k: int, layers: int) -> Result:
    """Sum over decoding; a token is one event per layer and k."""
    events = sum(run.decode_events for run in runs)
    tokens = events / (top_k * layers)
    return {
        "tokens": round(tokens),
        "hit_rate": round(sum(run.decode_hits for run in runs) / events, 4),
        "bytes_per_token": round(sum(run.decode_bytes_read for run in runs) / tokens),
        "stall_us_per_token": round(
            1e6 * sum(run.decode_stall_seconds for run in runs) / tokens, 1
        ),
        "bytes_in_all": round(sum(run.bytes_read for run in runs) / tokens),
        "stall_us_in_all": round(1e6 * sum(run.stall_seconds for run in runs) / tokens, 1),
    }


def main() -> None:
    o = _options()
    items = prompts(o.items)
    past, now = items[: len(items) // 2], items[len(items) // 2 :]
    found: Result = {"policies": {}, "starts": {}}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        teacher = Home(folder / "past", o.memory)
        teacher.run(past, "adaptive")
        manifest = teacher._model[0]
        sizes = manifest.top_k, manifest.layers
        ways = [(policy, policy, None) for policy in o.policies]
        ways.append(("adaptive, warm", "adaptive", teacher))
        for name, policy, eamc in ways:
            home = Home(folder / name, o.memory, eamc)
            found["policies"][name] = summary([home.run(now, policy)], *sizes)
            if policy == "adaptive":
                found["starts"][name] = summary(home.starts(now[: o.starts], policy), *sizes)
    found |= {"command": " ".join(sys.argv), "machine": machine(), "memory": o.memory}
    print(json.dumps(found, indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--items", type=int, default=600)
    parser.add_argument("--starts", type=int, default=60, help="engines started per way")
    parser.add_argument("--memory", default="30%")
    parser.add_argument(
        "--policies", type=lambda t: t.split(","), default=["lru", "lfu", "adaptive"]
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
