"""Measure reads ahead with a real gate's hints: the demo on a slow drive, with and without them.

Run: python -m scripts.bench_real_hints [--policies learned,adaptive] [--memory 20%,35%]
     [--per-kind 6] [--read-us 500]

Three engines of a policy take turns by exercise; the second and third never read ahead of demand.
Every read of the drive takes --read-us microseconds longer. Prints tokens/s of decoding and their
ratio, with the central 90 % of a bootstrap over exercises; the same ratio of the processor time of
the engine's thread, which other programs disturb less; and the noise: the ratio of the third
engine to the second, which are alike. Needs gcc.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle, permutations
from pathlib import Path
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from moeinf.cli.commands.models.pull import ensure
from moeinf.cli.output import Output
from moeinf.runtime.config import EngineConfig, Settings, read_environment
from moeinf.runtime.engine import loader
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.chat import Conversation
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.requests import Limits, SamplingOptions
from moeinf.runtime.sizes import parse_memory
from scripts.eval_demo import exercises
from scripts.lossy import run_on_slow_drive

Seconds = NDArray[np.float64]  # by exercise
Draws = NDArray[np.int64]  # exercises by bootstrap sample
NEVER = 2.0  # of decode time: no engine waits that long


def compare(policy: str, memory: str, per_kind: int) -> str:
    """Return a line with both speeds."""
    settings = read_environment()
    manifest, folder = ensure("demo:bf16", settings, Output())
    config = EngineConfig(memory=parse_memory(memory), trace=False)
    config = replace(config, policy=policy)
    rows = []
    with ExitStack() as opened:
        ahead, *without = [
            opened.enter_context(_engine(manifest, folder, config, settings, worth_share))
            for worth_share in (loader._WORTH_SHARE, NEVER, NEVER)
        ]
        before = ahead.store.stats.copy()
        orders = cycle(permutations([ahead, *without]))
        for item, order in zip(exercises("heldout", per_kind), orders, strict=False):
            row = {engine: _answer(engine, item["prompt"]) for engine in order}
            assert len({done[:2] for done in row.values()}) == 1
            rows.append([row[ahead][1], *(done for e in (ahead, *without) for done in row[e][2:])])
        read = ahead.store.stats.since(before).ahead_bytes_read
    tokens, *spent = np.array(rows).T
    times, cpu = np.array(spent[::2]), np.array(spent[1::2])
    draws = np.random.default_rng(0).integers(len(rows), size=(2000, len(rows)))
    return (
        f"| {memory} | {policy} | {tokens.sum() / times[1].sum():.0f} "
        f"| {tokens.sum() / times[0].sum():.0f} | {_ratio(times[1:].mean(0), times[0], draws)} "
        f"| {cpu[1:].mean(0).sum() / cpu[0].sum():.3f} | {_ratio(times[1], times[2], draws)} "
        f"| {read / tokens.sum() / 1024:.0f} KiB |"
    )


def _engine(
    manifest: Manifest, folder: Path, config: EngineConfig, settings: Settings, worth_share: float
) -> Engine:
    with patch.object(loader, "_WORTH_SHARE", worth_share):
        return Engine.open(manifest, folder, config, settings)


def _answer(engine: Engine, prompt: str) -> tuple[str, int, float, float]:
    """Return the text, its decode steps, their seconds, and those of the thread's processor."""
    answer = Conversation(engine).ask(
        prompt, SamplingOptions(temperature=0), Limits(max_tokens=128)
    )
    chunks = iter(answer)
    text, begin = next(chunks), time.thread_time()
    text += "".join(chunks)
    return text, answer.decode_steps, answer.decode_seconds, time.thread_time() - begin


def _ratio(slow: Seconds, fast: Seconds, draws: Draws) -> str:
    """Return the ratio of the sums, with the central 90 % over `draws`."""
    low, high = np.quantile(slow[draws].sum(1) / fast[draws].sum(1), (0.05, 0.95))
    return f"{slow.sum() / fast.sum():.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", default="learned,adaptive,eamc,markov")
    parser.add_argument("--memory", default="20%,35%")
    parser.add_argument("--per-kind", type=int, default=6)
    parser.add_argument("--read-us", type=int, default=500)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(compare(*options.one, options.per_kind))
        return
    with tempfile.TemporaryDirectory() as folder:
        for memory in options.memory.split(","):
            for policy in options.policies.split(","):
                arguments = ["--one", policy, memory, "--per-kind", str(options.per_kind)]
                command = [sys.executable, "-m", "scripts.bench_real_hints", *arguments]
                print(run_on_slow_drive(command, options.read_us, Path(folder)), end="", flush=True)


if __name__ == "__main__":
    main()
