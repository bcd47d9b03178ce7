"""python -m benchmarks.drives: decode from one drive and from two, under a memory limit.

Two engines of one shape differ only in MOEINF_HOME: the folder of the cache, or that and --second.
Routing is recorded. They take turns every few tokens. --drive limits each of the two folders to so
many bytes per second, for machines with one drive. It needs gcc.
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.calibrated import named
from benchmarks.long_prompt import on_slow_drive
from benchmarks.recorded_routing import ROUTINGS, fitted, routed, text
from benchmarks.shapes import SHAPES, shape
from moeinf.runtime.config import EngineConfig, read_environment
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.jobs.bench import machine
from moeinf.runtime.sizes import parse_memory

_PROMPT = 28


class Side:
    """One engine in the middle of an answer, and its times."""

    def __init__(self, engine: Engine, ids: list[int]) -> None:
        self._engine, self._ids = engine, ids
        self._state, self._at = engine.new_state(), _PROMPT
        engine.begin_request(self._state)
        engine.extend(self._state, ids[:_PROMPT])
        self._before = engine.store.stats.copy()
        self.seconds: list[float] = []

    def decode(self, tokens: int) -> None:
        for token in self._ids[self._at : self._at + tokens]:
            start = perf_counter()
            self._engine.extend(self._state, [token])
            self.seconds.append(perf_counter() - start)
        self._at += tokens

    def row(self) -> dict[str, Any]:
        stats, tokens = self._engine.store.stats.since(self._before), len(self.seconds)
        return {
            "ms_per_token": round(1e3 * statistics.mean(self.seconds), 2),
            "stall_ms_per_token": round(1e3 * stats.decode_stall_seconds / tokens, 2),
            "hit_rate": round(stats.hit_rate or 0.0, 4),
            "mb_per_token": round(stats.decode_bytes_read / tokens / 1e6, 1),
        }


def measured(o: argparse.Namespace) -> dict[str, Any]:
    """Return a row of each engine, and the ratio of their times."""
    one = routed(o.cache, named(o.shape, o.layers), shape(o.shape, o.layers), o.routing)
    two = replace(one, name=f"{one.name}-spread", more_homes=(o.second,))
    ids = text(o.routing, fitted(one.config, o.routing), _PROMPT + o.tokens, _PROMPT)
    limits = EngineConfig(
        memory=parse_memory(o.memory), context=len(ids), trace=False, direct_io=True, device="cpu",
        policy=o.policy, readers=o.readers,
    )  # fmt: skip
    with ExitStack() as opened:
        sides = {}
        for name, model in (("one", one), ("two", two)):
            engine = Engine.open(model.ours(o.tag), model.folder(o.tag), limits, model.settings)
            sides[name] = Side(opened.enter_context(engine), ids)
        for turn in range(o.tokens // o.every):
            for side in list(sides.values())[:: -1 if turn % 2 else 1]:
                side.decode(o.every)
        rows = {name: side.row() for name, side in sides.items()}
    ratio = rows["one"]["ms_per_token"] / rows["two"]["ms_per_token"]
    about = {"machine": machine(), "drive": o.drive, "memory": o.memory}
    return {**about, **rows, "times_as_fast": round(ratio, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tag", default="q4")
    parser.add_argument("--routing", default=ROUTINGS[0], choices=ROUTINGS)
    parser.add_argument("--policy", default="adaptive")
    parser.add_argument("--memory", default="35%")
    parser.add_argument("--readers", type=int)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--every", type=int, default=8, help="tokens per turn")
    parser.add_argument("--drive", help="bytes per second of each drive: 500MB")
    parser.add_argument("--cache", type=Path, default=read_environment().home / "benchmarks")
    parser.add_argument("--second", type=Path, required=True, help="a folder of the other drive")
    o = parser.parse_args()
    drives = (o.cache / "home", o.second)
    if not on_slow_drive("benchmarks.drives", o.drive, drives):
        print(json.dumps(measured(o), indent=1))


if __name__ == "__main__":
    main()
