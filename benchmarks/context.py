"""python -m benchmarks.context: measure the cost of a token by the number of tokens before it.

All experts are resident. The KV cache is filled with noise, because a prefill would take minutes
and leave the same number of bytes. Then the state moves back and forth between the lengths, a few
tokens at each, so that all lengths see the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.calibrated import named
from benchmarks.models import RaceModel
from benchmarks.shapes import SHAPES, shape
from moeinf.models.base import State
from moeinf.models.layers.kv_cache import KvCache
from moeinf.runtime.config import EngineConfig, read_environment
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.jobs.bench import machine, read_ceiling, token_bytes
from moeinf.runtime.machine.memory import rss_bytes
from moeinf.runtime.sizes import parse_memory

Result = dict[str, Any]


def fill(state: State, tokens: int) -> None:
    """Fill the state with `tokens` tokens of noise of the size that normed keys have."""
    assert isinstance(state, KvCache)
    assert state.length == 0
    for layer in range(state.layout.layers):
        for plane in state.planes(layer):
            plane[:, :tokens].normal_()
    state.advance(tokens)


def steps_at(engine: Engine, state: State, length: int, ids: list[int]) -> list[float]:
    """Return the seconds of one pass for each id, with `length` tokens before the first."""
    assert isinstance(state, KvCache)
    state.truncate(min(length, state.length))
    state.advance(length - state.length)  # the noise from before is still in the cache
    seconds = []
    for token in ids:
        start = time.perf_counter()
        engine.extend(state, [token])
        seconds.append(time.perf_counter() - start)
    return seconds


def measure(engine: Engine, lengths: list[int], rounds: int, every: int) -> Result:
    """Return the times per length, the line through them, and the memory of the cache."""
    random.seed(0)
    vocab = engine.info.vocab_size
    engine.extend(engine.new_state(), [random.randrange(vocab) for _ in range(256)])
    state = engine.new_state()
    before = rss_bytes()
    longest = max(lengths) + every
    fill(state, longest)
    grown = rss_bytes() - before
    taken: dict[int, list[float]] = {length: [] for length in lengths}
    speeds = []
    for number in range(rounds + 1):
        for length in lengths[:: -1 if number % 2 else 1]:
            ids = [random.randrange(vocab) for _ in range(every)]
            seconds = steps_at(engine, state, length, ids)
            if number:  # the first round warms up
                taken[length].append(statistics.median(seconds))
        speeds.append(read_ceiling(engine.info.threads))
    milliseconds = {n: 1e3 * statistics.median(values) for n, values in taken.items()}
    per_token = engine.info.manifest.kv_bytes_per_token
    sizes = np.array([n * per_token for n in lengths])
    slope, start = np.polyfit(sizes, [milliseconds[n] for n in lengths], 1)  # ms per byte, ms
    off = [abs(milliseconds[n] / (start + slope * n * per_token) - 1) for n in lengths]
    return {
        "kv_bytes_per_token": per_token,
        "planned_bytes": longest * per_token,
        "grown_bytes": grown,
        "grown_over_planned": round(grown / (longest * per_token), 4),
        "ms": {n: round(value, 2) for n, value in milliseconds.items()},
        "from_line": round(max(off), 3),
        "kv_bytes_per_s": round(1e3 / slope),
        "read_bytes_per_s": round(statistics.median(speeds)),
        "first_token_bytes": token_bytes(engine, lengths[0]).total,
    }


def main() -> None:
    o = _options()
    name = named(o.shape, o.layers)
    model = RaceModel(o.cache, name, shape(o.shape, o.layers))
    manifest = model.ours(o.tag)
    if o.make_only:
        return
    config = EngineConfig(
        memory=parse_memory("100%"),
        context=max(o.lengths) + o.slice,
        threads=o.threads,
        trace=False,
    )
    with Engine.open(manifest, model.folder(o.tag), config, model.settings) as engine:
        found = measure(engine, o.lengths, o.rounds, o.slice)
    found |= {"command": " ".join(sys.argv), "machine": machine(), "shape": name, "tag": o.tag}
    print(json.dumps(found, indent=1))


def _options() -> argparse.Namespace:
    cache = read_environment({**os.environ}).home / "benchmarks"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("--layers", type=int, help="fewer than the real shape has")
    parser.add_argument("--tag", default="q4")
    parser.add_argument("--lengths", type=_numbers, default=_numbers("512,4096,8192,16384,32760"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slice", type=int, default=8, help="tokens at each length and round")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cache", type=Path, default=cache, help="may be deleted")
    parser.add_argument("--make-only", action="store_true")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
