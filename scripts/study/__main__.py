"""Compute the tables and pictures of docs/study.md from recorded requests.

Run: python -m scripts.study --picture docs/study.png
Without files it takes the two models of tests/data/traces. Others are `.npz` files in the format of
docs/formats.md. Intervals (±) are half of the central 95 % of 1,000 bootstrap samples of requests.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.study import eviction, paper, prediction, workloads
from scripts.study.pictures import draw
from scripts.study.replays import Bench

TRACES = Path(__file__).parents[2] / "tests/data/traces"
FILES = [TRACES / "deepseek-v2-lite.npz", TRACES / "gpt-oss-20b.npz"]
SECTIONS = {
    "policies": eviction.policies,
    "warm": eviction.warm_against_cold,
    "capacity": eviction.capacities,
    "users": eviction.users,
    "shift": workloads.shift,
    "sparsity": workloads.sparsity,
    "prediction": prediction.recall,
    "parts": eviction.parts,
    "knobs": eviction.knobs,
    **paper.SECTIONS,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.study", description=__doc__)
    parser.add_argument("files", type=Path, nargs="*", default=FILES)
    parser.add_argument("--only", type=lambda t: t.split(","), default=list(SECTIONS))
    parser.add_argument("--picture", type=Path, metavar="OUT.png")
    parser.add_argument("--quick", action="store_true", help="few values, to see that all works")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    o = parser.parse_args(arguments)
    begin = time.monotonic()
    bench = Bench(o.files, o.quick, o.processes)
    try:
        # All replays are started before the first table is awaited.
        asked = [(n, path, SECTIONS[n](bench, path)) for n in o.only for path in o.files]
        for name, path, text in asked:
            print(f"\n### {name}, {path.stem}\n\n{text()}", flush=True)
        if o.picture is not None:
            draw(bench.curves, o.files, o.picture)
    finally:
        bench.close()
    print(f"\n{(time.monotonic() - begin) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
