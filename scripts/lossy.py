"""Measure the lossy options: tokens per second on a slow drive against the quality of answers.

Run: python -m scripts.lossy [--memory 20%,35%] [--per-kind 25] [--read-us 500] [--json]

Each option decodes the demo's held-out exercises, and scores their texts against the exact model.
Every read of the drive takes --read-us microseconds longer. Needs gcc.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moeinf.cli.commands.models.pull import ensure
from moeinf.cli.output import Output
from moeinf.runtime.config import EngineConfig, lossy_options, read_environment
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.chat import Conversation
from moeinf.runtime.jobs.evaluate import evaluate
from moeinf.runtime.requests import Limits, SamplingOptions
from moeinf.runtime.sizes import parse_memory
from scripts.eval_demo import exercises

Fields = dict[str, float]  # of EngineConfig
MODES: tuple[Fields, ...] = (
    {},
    {"skip_below": 0.03},
    {"skip_below": 0.1},
    {"skip_below": 0.2},
    {"cache_aware": 0.05},
    {"cache_aware": 0.1},
    {"cache_aware": 0.2},
    {"q2_on_miss": 0.75},
    {"q2_on_miss": 0.6},
    {"q2_on_miss": 0.3},
)
_MODEL, _COPIES = "demo:bf16", "demo:q2"
_SLOW = Path(__file__).parents[1] / "tests" / "machines" / "slow_drive.c"


def measured(lossy: Fields, memory: str, per_kind: int) -> dict[str, Any]:
    """Return one row: quality and speed of an option."""
    settings = read_environment()
    ensure(_COPIES, settings, Output())
    manifest, folder = ensure(_MODEL, settings, Output())
    limited = EngineConfig(memory=parse_memory(memory), trace=False, **lossy)  # type: ignore[arg-type]
    whole = EngineConfig(memory=parse_memory("100%"), trace=False)
    items = exercises("heldout", per_kind)
    right = tokens = 0
    seconds = 0.0
    with (
        Engine.open(manifest, folder, limited, settings) as engine,
        Engine.open(manifest, folder, whole, settings) as exact,
    ):
        before = engine.store.stats.copy()
        for item in items:
            conversation = Conversation(engine)
            options = SamplingOptions(temperature=0)
            answer = conversation.ask(item["prompt"], options, Limits(max_tokens=128))
            right += "".join(answer) == item["answer"]
            tokens, seconds = tokens + answer.decode_steps, seconds + answer.decode_seconds
        store = engine.store.stats.since(before)
        texts = "".join(f"<|user|>{i['prompt']}<|assistant|>{i['answer']}<|end|>" for i in items)
        score = evaluate(engine, exact, texts, decode=True)
    return {
        "memory": memory,
        "option": " ".join(lossy_options(limited.lossy)) or "exact",
        "right": right / len(items),
        "tokens_per_s": tokens / seconds,
        "hit_rate": store.hit_rate,
        "bytes_read_per_token": store.decode_bytes_read // tokens,
        "perplexity": score.perplexity,
        "kl_divergence": score.kl_divergence,
        "top1_agreement": score.top1_agreement,
    }


def run_on_slow_drive(
    command: list[str],
    read_us: int,
    folder: Path,
    bytes_per_s: int | None = None,
    drives: Sequence[Path] = (),
) -> str:
    """Return a process's output; each of its reads takes `read_us` longer. Builds into `folder`.

    bytes_per_s: what all reads together get; None: no limit. drives: folders that each get as much.
    """
    shim = folder / "slow_drive.so"
    if not shim.exists():
        build = ["gcc", "-shared", "-fPIC", "-O2", str(_SLOW), "-o", str(shim), "-ldl"]
        subprocess.run(build, check=True)
    made = {"LD_PRELOAD": str(shim), "MOEINF_FAKE_READ_US": str(read_us)}
    if bytes_per_s is not None:
        made["MOEINF_FAKE_BYTES_PER_S"] = str(bytes_per_s)
    if drives:
        made["MOEINF_FAKE_DRIVES"] = ":".join(os.fspath(drive.resolve()) for drive in drives)
    environment = {**os.environ, **made}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def row(found: dict[str, Any]) -> str:
    """Return a line of the table in docs/lossy.md."""
    return (
        f"| {found['memory']} | {found['option']} | {found['tokens_per_s']:.0f} "
        f"| {found['hit_rate']:.1%} | {found['bytes_read_per_token'] >> 10} KiB "
        f"| {found['right']:.1%} | {found['perplexity']:.3f} | {found['kl_divergence']:.4f} "
        f"| {found['top1_agreement']:.1%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", default="20%,35%")
    parser.add_argument("--per-kind", type=int, default=25)
    parser.add_argument("--read-us", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        lossy, memory, per_kind = json.loads(options.one)
        print(json.dumps(measured(lossy, memory, per_kind)))
        return
    with tempfile.TemporaryDirectory() as folder:
        for memory in options.memory.split(","):
            for lossy in MODES:
                chosen = json.dumps([lossy, memory, options.per_kind])
                command = [sys.executable, "-m", "scripts.lossy", "--one", chosen]
                found = json.loads(run_on_slow_drive(command, options.read_us, Path(folder)))
                print(json.dumps(found) if options.json else row(found), flush=True)


if __name__ == "__main__":
    main()
