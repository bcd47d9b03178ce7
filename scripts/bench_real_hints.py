"""Measure reads ahead with a real gate's hints: the demo on a slow drive, with and without them.

Run: python -m scripts.bench_real_hints [--policies learned,adaptive] [--memory 20%,35%]
     [--per-kind 6] [--read-us 500]

Two engines of a policy take turns by exercise; the second never reads ahead of demand. Every read
of the drive takes --read-us microseconds longer. Prints tokens/s of decoding and their ratio, with
the central 90 % of a bootstrap over exercises, and the same ratio of the processor time of the
engine's thread, which other programs disturb less. Needs gcc.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from moeinf.cli.commands.models.pull import ensure
from moeinf.cli.output import Output
from moeinf.runtime.config import EngineConfig, read_environment
from moeinf.runtime.engine import loader
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.chat import Conversation
from moeinf.runtime.requests import Limits, SamplingOptions
from moeinf.runtime.sizes import parse_memory
from scripts.eval_demo import exercises
from scripts.lossy import run_on_slow_drive

NEVER = 2.0  # of decode time: no engine waits that long


def compare(policy: str, memory: str, per_kind: int) -> str:
    """Return a line with both speeds."""
    settings = read_environment()
    manifest, folder = ensure("demo:bf16", settings, Output())
    config = EngineConfig(memory=parse_memory(memory), trace=False)
    config = replace(config, policy=policy)
    rows = []
    with Engine.open(manifest, folder, config, settings) as ahead:
        loader._WORTH_SHARE = NEVER
        with Engine.open(manifest, folder, config, settings) as without:
            before = ahead.store.stats.copy()
            for turn, item in enumerate(exercises("heldout", per_kind)):
                row = {}
                for engine in (ahead, without) if turn % 2 else (without, ahead):
                    answer = Conversation(engine).ask(
                        item["prompt"], SamplingOptions(temperature=0), Limits(max_tokens=128)
                    )
                    chunks = iter(answer)
                    text, begin = next(chunks), time.thread_time()
                    text += "".join(chunks)
                    spent = time.thread_time() - begin
                    row[engine] = (text, answer.decode_steps, answer.decode_seconds, spent)
                assert row[ahead][:2] == row[without][:2]
                rows.append((row[ahead][1], *row[without][2:], *row[ahead][2:]))
            read = ahead.store.stats.since(before).ahead_bytes_read
    tokens, slow, slow_cpu, fast, fast_cpu = np.array(rows).T
    draws = np.random.default_rng(0).integers(len(rows), size=(2000, len(rows)))
    low, high = np.quantile(slow[draws].sum(1) / fast[draws].sum(1), (0.05, 0.95))
    speeds = tokens.sum() / slow.sum(), tokens.sum() / fast.sum()
    return (
        f"| {memory} | {policy} | {speeds[0]:.0f} | {speeds[1]:.0f} "
        f"| {slow.sum() / fast.sum():.3f} ({low:.3f} to {high:.3f}) "
        f"| {slow_cpu.sum() / fast_cpu.sum():.3f} "
        f"| {read / tokens.sum() / 1024:.0f} KiB |"
    )


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
