"""Replay many users on 1 to 64 replicas; write docs/cluster.csv, its table and docs/cluster.png.

Run: python -m scripts.cluster              (everything that the CSV lacks; some 40 minutes)
     python -m scripts.cluster --data NAME  (one set of traces)
     python -m scripts.cluster --pages      (only the table and the picture)
Each result is appended to the CSV: delete it to run again. No figure depends on a clock. The replay
is that of `moeinf simulate --replicas`. With 4 replicas at load 0.6, a row is the mean of 3 seeds.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from moeinf.cli.views.cluster_replay import cluster_picture
from moeinf.offload.replicas.names import ROUTERS, RouterName
from moeinf.offload.replicas.router import Router
from moeinf.offload.routing.requests_file import RecordedRequests, read_requests
from moeinf.offload.simulator.cluster import Machine, run_cluster, service_seconds
from moeinf.offload.simulator.workload import Habits, draw

TRACES = Path(__file__).parents[1] / "tests/data/traces"
PAGE, TABLE, PICTURE = (Path(f"docs/cluster.{end}") for end in ("md", "csv", "png"))
START, END = "<!-- table of scripts/cluster.py -->", "<!-- end of the table -->"
SHARE = 0.2  # of all experts that fit in a replica
POLICY = "learned"
DATA = ("deepseek-v2-lite", "gpt-oss-20b")
REPLICAS = (4, 1, 2, 8, 16, 32, 64)
SEEDS = 3
MEASURED = (
    "hit_rate", "bytes_read_per_token", "wait_p50_s", "wait_p99_s", "imbalance", "tokens_per_s",
    "by_prefix", "by_experts",
)  # fmt: skip
FIELDS = ("data", "replicas", "router", "seed", "load", "telling", *MEASURED)


@dataclass(frozen=True)
class Task:
    """One run of the cluster."""

    data: str
    replicas: int
    router: RouterName
    seed: int = 0
    load: float = 0.6
    telling: float = 0.3

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(str(getattr(self, name)) for name in FIELDS[:6])


def tasks(data: str) -> Iterator[Task]:
    """Yield every run: over replicas, over the load, and over how much a prompt tells."""
    for replicas in REPLICAS:
        for seed in range(SEEDS if replicas == 4 else 1):
            for router in ROUTERS:
                yield Task(data, replicas, router, seed)
        if replicas == 4:
            for router in ROUTERS:
                for load in (0.3, 0.9):
                    yield Task(data, replicas, router, load=load)
            for telling in (0.0, 1.0):
                yield Task(data, replicas, "experts", telling=telling)


def run(task: Task, requests: RecordedRequests) -> dict[str, object]:
    """Return a row of the CSV."""
    machine = Machine(POLICY, SHARE)
    habits = Habits(
        conversations=max(60, 4 * task.replicas),
        users=10 * task.replicas,
        load=task.load,
        telling=task.telling,
        seed=task.seed,
    )
    service_s = service_seconds(requests, machine, draw(requests, habits, 1, 1.0))
    conversations = draw(requests, habits, task.replicas, service_s)
    router = Router(task.router, task.seed)
    sums = run_cluster(requests, conversations, machine, router, task.replicas, service_s / 2)
    decided = sum(sums.decisions.values())
    numbers = (
        sums.hit_rate, sums.bytes_read_per_token, sums.wait_s(0.5), sums.wait_s(0.99),
        sums.imbalance, sums.tokens_per_s,
        sums.decisions.get("prefix", 0) / decided, sums.decisions.get("experts", 0) / decided,
    )  # fmt: skip
    return dict(zip(FIELDS, (*task.key, *(f"{n:.6g}" for n in numbers)), strict=True))


def read(path: Path) -> dict[tuple[str, ...], dict[str, str]]:
    """Return the rows of a CSV by their keys; empty without a file."""
    if not path.exists():
        return {}
    with path.open() as file:
        return {tuple(row[name] for name in FIELDS[:6]): row for row in csv.DictReader(file)}


def append(path: Path, row: dict[str, object]) -> None:
    new = not path.exists()
    with path.open("a", newline="") as file:
        out = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if new:
            out.writeheader()
        out.writerow(row)


def averaged(rows: dict[tuple[str, ...], dict[str, str]]) -> list[dict[str, str | float]]:
    """Return the means over seeds, in the order of the table."""
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for key, row in rows.items():
        groups.setdefault((*key[:3], *key[4:]), []).append(row)

    def place(key: tuple[str, ...]) -> tuple[object, ...]:
        return (
            key[0],
            key[3] != "0.6",
            key[4] != "0.3",
            int(key[1]),
            key[3:],
            [*ROUTERS].index(key[2]),
        )

    return [
        {
            **{name: groups[key][0][name] for name in FIELDS[:6]},
            **{name: mean(float(row[name]) for row in groups[key]) for name in MEASURED},
        }
        for key in sorted(groups, key=place)
    ]


def table(found: list[dict[str, str | float]]) -> str:
    head = (
        "traces", "replicas", "load", "router", "hit %", "MB/token", "wait p50 s", "wait p99 s",
        "imbalance", "tok/s", "by prefix %", "by experts %",
    )  # fmt: skip
    lines = [head, ("---",) * len(head)]
    for row in found:
        router = str(row["router"])
        if row["telling"] != "0.3":
            router += f", telling {row['telling']}"
        numbers = [float(row[name]) for name in MEASURED]
        scales = (100, 1e-6, 1, 1, 1, 1, 100, 100)
        digits = (1, 0, 1, 0, 2, 2, 0, 0)
        cells = [f"{n * s:.{d}f}" for n, s, d in zip(numbers, scales, digits, strict=True)]
        lines.append((row["data"], row["replicas"], row["load"], router, *cells))
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def pages(rows: dict[tuple[str, ...], dict[str, str]]) -> None:
    """Write the table into the page, and draw the picture."""
    found = averaged(rows)
    before, _, rest = PAGE.read_text().partition(START)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{START}\n\n{table(found)}\n\n{END}{after}")
    documents = []
    for data in dict.fromkeys(row["data"] for row in found):
        mine = [
            {**row, "replicas": int(row["replicas"]), "policy": POLICY, "capacity": SHARE}
            for row in found
            if (row["data"], row["load"], row["telling"]) == (data, "0.6", "0.3")
        ]
        documents.append({"name": data, "results": mine})
    cluster_picture(documents, PICTURE)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, default=TABLE)
    parser.add_argument("--data", choices=DATA, action="append")
    parser.add_argument("--most", type=int, default=64, help="replicas")
    parser.add_argument("--pages", action="store_true", help="run nothing")
    options = parser.parse_args(arguments)
    for data in () if options.pages else options.data or DATA:
        requests = read_requests(TRACES / f"{data}.npz")
        for task in tasks(data):
            if task.replicas <= options.most and task.key not in read(options.csv):
                append(options.csv, run(task, requests))
                print(*task.key, flush=True)
    if not options.data:
        pages(read(options.csv))


if __name__ == "__main__":
    main()
