"""python -m benchmarks.overhead: measure the cost per decoded token of tracing and deciding.

One engine decodes with all experts in memory and its default settings. The seconds inside these
pieces are counted in the same run:

    tracing    the recorder's calls, minus the store's calls inside them
    deciding   the policy's calls and the bookkeeping of residents, matching with past requests
               included (`StoreStats.decode_policy_seconds`)

Token times vary by 10 % from one moment to the next on such a machine. A cost of a few percent does
not show in the difference of two runs, but a share counted within one run does. The clock's own
calls are counted too, some 0.1 us each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.calibrated import Calibration, calibrated, named, tokens
from benchmarks.shapes import SHAPES, shape
from moeinf.models.base import Experts, Pending, Phase
from moeinf.runtime.config import EngineConfig, read_environment
from moeinf.runtime.eamc.recorder import Recorder, routing_shape
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.jobs.bench import decode, machine, prefill
from moeinf.runtime.sizes import parse_memory

Result = dict[str, Any]


class Counted:
    """`Experts`, with the seconds inside its calls summed."""

    def __init__(self, experts: Experts) -> None:
        self._experts = experts
        self.seconds = 0.0

    @property
    def wants_hints(self) -> bool:
        return self._experts.wants_hints

    def begin_pass(self, rows: Tensor, phase: Phase) -> None:
        begin = time.perf_counter()
        self._experts.begin_pass(rows, phase)
        self.seconds += time.perf_counter() - begin

    def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Pending:
        begin = time.perf_counter()
        pending = self._experts.submit(layer, x, ids, weights)
        self.seconds += time.perf_counter() - begin
        return pending

    def hint(self, layer: int, ids: Tensor, scores: Tensor) -> None:
        begin = time.perf_counter()
        self._experts.hint(layer, ids, scores)
        self.seconds += time.perf_counter() - begin

    def end_pass(self, accepted_rows: Tensor | None = None) -> None:
        begin = time.perf_counter()
        self._experts.end_pass(accepted_rows)
        self.seconds += time.perf_counter() - begin


def measure(engine: Engine, text: list[int], every: int) -> Result:
    """Decode `text` in slices of `every` tokens after a prompt of 64; the first is a warm-up."""
    inner = Counted(engine.store)
    outer = Counted(Recorder(inner, routing_shape(engine.info.manifest)))
    with engine.routed_through(lambda _: outer):
        return _shares(engine, inner, outer, text, every)


def _shares(engine: Engine, inner: Counted, outer: Counted, text: list[int], every: int) -> Result:
    state, ids = engine.new_state(), iter(text)
    engine.begin_request(state)
    logits, _ = prefill(engine, state, list(islice(ids, 64)))
    shares: dict[str, list[float]] = {"tracing": [], "deciding": []}
    taken, first = list[float](), True
    while forced := list(islice(ids, every)):
        before = outer.seconds - inner.seconds, engine.store.stats.decode_policy_seconds
        logits, seconds = decode(engine, state, logits, len(forced), forced)
        after = outer.seconds - inner.seconds, engine.store.stats.decode_policy_seconds
        if not first:
            taken += seconds
            for name, start, end in zip(shares, before, after, strict=True):
                shares[name].append((end - start) / sum(seconds))
        first = False
    both = [tracing + deciding for tracing, deciding in zip(*shares.values(), strict=True)]
    low, middle, high = statistics.quantiles(both, n=4)
    return {
        "tokens": len(taken),
        "ms_per_token": round(1e3 * statistics.fmean(taken), 3),
        **{f"{name}_share": round(statistics.fmean(all_), 5) for name, all_ in shares.items()},
        "share": round(statistics.fmean(both), 5),
        "share_quartiles": [round(value, 5) for value in (low, middle, high)],
        "hit_rate": engine.store.stats.hit_rate,
    }


def main() -> None:
    o = _options()
    model = calibrated(o.cache, named(o.shape, o.layers), shape(o.shape, o.layers), Calibration())
    manifest = model.ours(o.tag)
    count = 64 + o.tokens
    config = EngineConfig(
        memory=parse_memory(o.memory), context=count, threads=o.threads, policy=o.policy
    )
    text = tokens(Calibration(), model.config["vocab_size"], count)
    with Engine.open(manifest, model.folder(o.tag), config, model.settings) as engine:
        found = measure(engine, text, o.slice)
    found |= {"command": " ".join(sys.argv), "machine": machine(), "shape": o.shape, "tag": o.tag}
    print(json.dumps(found, indent=1))


def _options() -> argparse.Namespace:
    cache = read_environment({**os.environ}).home / "benchmarks"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("--layers", type=int, help="fewer than the real shape has")
    parser.add_argument("--tag", default="q4")
    parser.add_argument("--policy", default="adaptive")
    parser.add_argument("--memory", default="100%")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--slice", type=int, default=20, help="tokens of one share")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cache", type=Path, default=cache, help="may be deleted")
    return parser.parse_args()


if __name__ == "__main__":
    main()
