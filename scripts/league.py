"""The league: every policy against the same real requests; writes docs/league.md, .csv and .png.

Run: python -m scripts.league            (all, two processes; some 12 minutes on 2 quiet cores)
     python -m scripts.league --quick    (three requests, one capacity, written nowhere but the CSV)
Results are written to the CSV one by one, and a run leaves out those that are there: delete the CSV
to measure again. Hit rates depend on no clock and no machine. The replay is that of
`moeinf simulate`, with its model of time: policies that read ahead read while the link is idle.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from functools import cache
from math import inf
from pathlib import Path

import numpy as np

from moeinf.offload.policy.base import Policy, Setup
from moeinf.offload.policy.table import POLICIES
from moeinf.offload.routing.eamc import Eamc
from moeinf.offload.routing.requests_file import read_requests
from moeinf.offload.routing.route_csv import read_route_csv
from moeinf.offload.routing.trace import Recording
from moeinf.offload.simulator.cases import Case, run_case
from moeinf.offload.simulator.clock import TimeModel
from moeinf.offload.simulator.oracles import Histogram, Horizon
from moeinf.offload.simulator.outcome import Outcome
from moeinf.offload.simulator.replay import Conditions, Replay

TRACES = Path(__file__).parents[1] / "tests/data/traces"
DATA = {"deepseek-v2-lite": 60, "gpt-oss-20b": 30, "qwen3-30b-a3b": 1, "gemma-4-26b-a4b": 1}
SHARES = (0.2, 0.1, 0.35, 0.5, 0.05, 0.03, 0.7, 0.9)  # the order in which they run
HORIZONS = {f"next {h} tokens": h for h in (0, 1, 2, 4, 8)} | {"all tokens": inf}
HISTOGRAMS = {"request histogram": False, "task histogram": True}
ORACLES = (*HORIZONS, *HISTOGRAMS)
ORACLE_SHARES = (0.2, 0.1, 0.35, 0.5)
EARLY = 16  # tokens of a request
_SAMPLES = 1000


@dataclass(frozen=True)
class Row:
    """One contestant on one data set at one capacity; rates in per cent of decode events."""

    data: str
    contestant: str
    share: float
    hit_rate: float
    low: float  # 95 % interval, by resampling requests
    high: float
    early: float  # of the first EARLY tokens of each request
    reads_per_token: float
    requests: int

    @property
    def key(self) -> tuple[str, str, float]:
        return self.data, self.contestant, self.share


@cache
def recording(data: str, most: int) -> Recording:
    """Return the first `most` requests of a data set."""
    path = TRACES / f"{data}.npz"
    if not path.exists():
        return read_route_csv(TRACES / f"{data}.route.csv.gz")
    whole = read_requests(path).recording()
    return whole.select(whole.requests[:most])


def replayed(name: str, routing: Recording, share: float) -> Outcome:
    """Replay one contestant with a collection that begins empty."""
    if name in POLICIES or name == "belady":
        return run_case(routing, Case(name, share), TimeModel())
    shape = routing.shape

    def oracle(setup: Setup) -> Policy:
        if name in HORIZONS:
            return Horizon(setup, routing, HORIZONS[name])
        return Histogram(setup, routing, HISTOGRAMS[name])

    slots = max(1, round(share * shape.layers * shape.experts))
    return Replay(routing, oracle, Conditions(slots), Eamc(1, shape.layers, shape.experts)).run()


def measured(task: tuple[str, str, float], requests: int) -> Row:
    """Run one contestant at one capacity."""
    data, name, share = task
    outcome = replayed(name, recording(data, requests), share)
    low, high = interval(outcome)
    early = [token for token in outcome.tokens if token.age < EARLY]
    rate = 100 * sum(t.hits for t in early) / max(1, sum(t.events for t in early))
    count = len({token.request for token in outcome.tokens})
    numbers = 100 * outcome.hit_rate, low, high, rate, outcome.reads_per_token
    return Row(data, name, share, *(round(number, 2) for number in numbers), count)


def interval(outcome: Outcome) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the hit rate over requests, in per cent."""
    sums: dict[int, list[int]] = {}
    for token in outcome.tokens:
        mine = sums.setdefault(token.request, [0, 0])
        mine[0] += token.hits
        mine[1] += token.events
    counts = np.array(list(sums.values()), float)
    chosen = np.random.default_rng(0).integers(len(counts), size=(_SAMPLES, len(counts)))
    hits, events = counts[chosen].sum(1).T
    low, high = np.percentile(100 * hits / events, [2.5, 97.5])
    return float(low), float(high)


def tasks(shares: Iterable[float]) -> list[tuple[str, str, float]]:
    """Return every (data set, contestant, capacity); the most telling ones first."""
    found = []
    for share in shares:
        for data in DATA:
            names = ["belady", *POLICIES]
            if share in ORACLE_SHARES and (TRACES / f"{data}.npz").exists():
                names += ORACLES
            found += [(data, name, share) for name in names]
    return found


def read(path: Path) -> dict[tuple[str, str, float], Row]:
    """Return the results of a CSV by their keys; empty without a file."""
    if not path.exists():
        return {}
    casts = {"str": str, "float": float, "int": int}
    kinds = {field.name: casts[str(field.type)] for field in fields(Row)}
    with path.open() as file:
        rows = [
            Row(**{name: kinds[name](text) for name, text in line.items()})
            for line in csv.DictReader(file)
        ]
    return {row.key: row for row in rows}


def write(path: Path, rows: Iterable[Row]) -> None:
    with path.open("w", newline="") as file:
        out = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        out.writeheader()
        out.writerows(asdict(row) for row in sorted(rows, key=lambda row: row.key))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, default=Path("docs/league.csv"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="of all experts")
    options = parser.parse_args(arguments)
    rows = read(options.csv)
    left = [
        task for task in tasks(SHARES[:1] if options.quick else options.shares) if task not in rows
    ]
    with ProcessPoolExecutor(options.processes) as pool:
        running = [
            pool.submit(measured, task, min(3, DATA[task[0]]) if options.quick else DATA[task[0]])
            for task in left
        ]
        for number, done in enumerate(as_completed(running), 1):
            row = done.result()
            rows[row.key] = row
            write(options.csv, rows.values())
            print(
                f"{number}/{len(left)} {row.data} {row.contestant} {row.share:.0%}: {row.hit_rate}"
            )
    if not options.quick:
        from scripts.league_pages import draw, tabulate

        tabulate(rows, Path("docs/league.md"))
        draw(rows, Path("docs/league.png"))


if __name__ == "__main__":
    main()
