"""python -m benchmarks.long_prompt: prompts with windows of many tokens, and of one chunk.

Engines of one model differ in their memory and their window alone. They take turns. A prompt is one
of a recording, or random (`--routing calibrated`). `bound_s` is the longer of two times: that of
the engine with every expert in RAM, and the bytes that were read ÷ the drive's speed. --drive
limits the drive, for machines whose cores are slower than their drives. It needs gcc.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.recorded_routing import ROUTINGS, fitted, routed, text
from benchmarks.shapes import SHAPES, shape
from moeinf.runtime.config import PREFILL_CHUNK, EngineConfig, read_environment
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.jobs.bench import machine
from moeinf.runtime.placement.bandwidth import measure
from moeinf.runtime.sizes import parse_memory, parse_size
from scripts.lossy import run_on_slow_drive

_FIRST_TOKENS = 512  # of a prompt that fills the slots before anything is measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tag", default="q4")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--shares", default="100%,35%,18%", help="of the experts that fit")
    parser.add_argument("--chunks", default="18%", help="shares that also run chunk by chunk")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--routing", default=ROUTINGS[0], choices=ROUTINGS)
    parser.add_argument("--drive", help="bytes per second that the drive is limited to: 500MB")
    parser.add_argument("--cache", type=Path, default=read_environment().home / "benchmarks")
    o = parser.parse_args()
    if not on_slow_drive("benchmarks.long_prompt", o.drive):
        print(json.dumps(measured(o), indent=1))


def on_slow_drive(module: str, drive: str | None, drives: Sequence[Path] = ()) -> bool:
    """Run this command again on a drive of `drive` bytes per second; False: it is there already.

    drives: folders that are drives of their own, each with that speed.
    """
    if drive is None or "MOEINF_FAKE_BYTES_PER_S" in os.environ:
        return False
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", module, *sys.argv[1:]]
        done = run_on_slow_drive(command, 0, Path(folder), parse_size(drive), drives)
        print(done, end="")
    return True


def measured(o: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds, the bytes and the bound of each engine."""
    config = shape(o.shape, o.layers)
    name = o.shape if o.layers is None else f"{o.shape}-{o.layers}"
    model = routed(o.cache, name, config, o.routing)
    manifest, folder = model.ours(o.tag), model.folder(o.tag)
    window = -(-o.tokens // PREFILL_CHUNK) * PREFILL_CHUNK
    ids = text(o.routing, fitted(config, o.routing), o.tokens, o.tokens)
    cases = [(share, window) for share in o.shares.split(",")]
    cases += [(share, PREFILL_CHUNK) for share in o.chunks.split(",") if share]
    found: dict[tuple[str, int], list[tuple[float, int]]] = {case: [] for case in cases}
    with ExitStack() as opened:
        engines = {}
        for share, tokens in cases:
            limits = EngineConfig(
                memory=parse_memory(share), context=window, window=tokens, trace=False,
                direct_io=True, device="cpu",
            )  # fmt: skip
            engine = Engine.open(manifest, folder, limits, model.settings)
            engines[share, tokens] = opened.enter_context(engine)
            engine.extend(engine.new_state(), ids[:_FIRST_TOKENS])
        for _ in range(o.rounds):
            for case, engine in engines.items():
                before, start = engine.store.stats.bytes_read, time.perf_counter()
                engine.extend(engine.new_state(), ids)
                seconds = time.perf_counter() - start
                found[case].append((seconds, engine.store.stats.bytes_read - before))
        drive = parse_size(o.drive) if o.drive else 0
        disk = drive or measure(model.settings, folder, manifest).disk_bytes_per_s
    seconds = {case: statistics.median(s for s, _ in runs) for case, runs in found.items()}
    result: dict[str, Any] = {"machine": machine(), "disk_bytes_per_s": disk, "tokens": o.tokens}
    for case in cases:
        read = found[case][-1][1]
        row = {"seconds": round(seconds[case], 2), "bytes": read}
        if ("100%", window) in seconds:
            bound = max(seconds["100%", window], read / disk)
            row |= {"bound_s": round(bound, 2), "ratio": round(seconds[case] / bound, 2)}
        if case[1] == PREFILL_CHUNK and (case[0], window) in seconds:
            row["window_is_faster"] = round(seconds[case] / seconds[case[0], window], 2)
        result[f"{case[0]} of the experts, windows of {case[1]}"] = row
    return result


if __name__ == "__main__":
    main()
