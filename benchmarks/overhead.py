"""python -m benchmarks.overhead: what tracing, matching and deciding cost when every expert fits.

Does not know other programs. One engine decodes in slices that alternate between two ways:

    full   as it is by default: every pass is written down, matched, and decided about
    bare   the store alone, with a policy that does nothing

A slice's figure is its median token; the cost is the median of the rounds' ratios. Slices are
short, so that the machine's moods fall on both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.calibrated import Calibration, calibrated, named, tokens
from benchmarks.shapes import SHAPES, shape
from moeinf.offload.policy import Passive
from moeinf.offload.policy.base import Evictable
from moeinf.runtime.bench import decode, machine, prefill
from moeinf.runtime.config import EngineConfig, read_environment
from moeinf.runtime.engine import Engine
from moeinf.runtime.sizes import parse_memory

Result = dict[str, Any]


class Nothing(Passive):
    """A policy for experts that all fit: it is never asked who leaves."""

    def admitted(self, cell: int) -> None: ...

    def victim(self, evictable: Evictable) -> int | None:
        return None


class Switch:
    """Turns what stands around an engine's store off and on, between passes."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._store = engine, engine.store
        self._full = engine.experts, engine.store._policy
        self._bare = engine.store, Nothing(engine.store._policy.setup)  # type: ignore[attr-defined]

    def turn(self, full: bool) -> None:
        experts, policy = self._full if full else self._bare
        self._engine.experts, self._store._policy = experts, policy


def measure(engine: Engine, text: list[int], rounds: int, every: int) -> Result:
    """Decodes `text` in slices, alternating; the first round warms up."""
    assert engine.recorder is not None
    switch, state = Switch(engine), engine.new_state()
    engine.begin_request(state)
    ids = iter(text)
    logits, _ = prefill(engine, state, [next(ids) for _ in range(64)])
    taken: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds + 1):
        for full in (True, False) if number % 2 else (False, True):
            switch.turn(full)
            forced = [next(ids) for _ in range(every)]
            logits, seconds = decode(engine, state, logits, every, forced)
            if number:
                taken[full].append(statistics.median(seconds))
    switch.turn(True)
    ratios = [full / bare for full, bare in zip(taken[True], taken[False], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "rounds": rounds,
        "full_ms": round(1e3 * statistics.median(taken[True]), 3),
        "bare_ms": round(1e3 * statistics.median(taken[False]), 3),
        "cost": round(statistics.median(ratios) - 1, 4),
        "cost_quartiles": [round(low - 1, 4), round(high - 1, 4)],
    }


def main() -> None:
    o = _options()
    model = calibrated(o.cache, named(o.shape, o.layers), shape(o.shape, o.layers), Calibration())
    manifest = model.ours(o.tag)
    count = 64 + 2 * (o.rounds + 1) * o.slice
    config = EngineConfig(
        memory=parse_memory("100%"), context=count, threads=o.threads, policy=o.policy
    )
    text = tokens(Calibration(), model.config["vocab_size"], count)
    with Engine(manifest, model.folder(o.tag), config, model.settings) as engine:
        found = measure(engine, text, o.rounds, o.slice)
    found |= {"command": " ".join(sys.argv), "machine": machine(), "shape": o.shape, "tag": o.tag}
    print(json.dumps(found, indent=1))


def _options() -> argparse.Namespace:
    cache = read_environment({**os.environ}).home / "benchmarks"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("--layers", type=int, help="fewer than the real shape has")
    parser.add_argument("--tag", default="q4")
    parser.add_argument("--policy", default="adaptive")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--slice", type=int, default=8, help="tokens per round and way")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cache", type=Path, default=cache, help="may be deleted")
    return parser.parse_args()


if __name__ == "__main__":
    main()
