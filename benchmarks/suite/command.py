"""python -m benchmarks: run ours and the installed peers over all scenarios.

--quick takes minutes. Rows run scenario by scenario, ours first, and are written to --out at once;
rows that are already in --out do not run again. (`python -m benchmarks SHAPE` races ours against
llama.cpp in alternation, with more precise ratios: see its --help.)
"""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.table import PEERS, SERVERS, Peer
from benchmarks.recorded_routing import ROUTINGS
from benchmarks.shapes import SHAPES
from benchmarks.suite import scenarios
from benchmarks.suite.figures import OURS, ROUNDS
from benchmarks.suite.goals import missed, profile
from benchmarks.suite.models import make
from benchmarks.suite.picture import draw
from benchmarks.suite.report import OtherModel, Results, markdown
from benchmarks.suite.row import Bench, Here, run
from benchmarks.suite.scenarios import Scenario
from moeinf.runtime.config import read_environment
from moeinf.runtime.jobs.bench import machine

_MOST_MINUTES = 70.0  # of the default selection
_QUICK_ROW_S, _ALL_ROW_S = 60.0, 600.0
# Seconds per layer and token of OLMoE's shape on two cores, only for the estimate of the run time:
# (prompt, decode, decode with too little memory).
_PACE = {
    OURS: (0.6e-3, 2.8e-3, 4e-3),
    "llama.cpp": (1e-3, 3e-3, 0.1),
    "llama.cpp no-repack": (1.5e-3, 4e-3, 0.1),
}
_OTHER_PACE = (2e-3, 10e-3, 0.1)
_START_S = 8.0
Job = tuple[Scenario, Peer | None]


def main(arguments: list[str]) -> None:
    o = _options(arguments)
    chosen = _selection(o)
    programs: list[Peer | None] = [None if n == OURS else PEERS[n] for n in o.programs]
    jobs: list[Job] = [(s, p) for s in chosen for p in programs if p is None or s.place in p.places]
    pythons = dict(o.python)
    gguf_python = pythons.get("llama_cpp", sys.executable)
    here = Here(_has_gpu(), pythons, SERVERS | dict(o.server), dict(o.served))
    problems = {job: here.problem(job[1], job[0]) for job in jobs}
    formats = {p.weights for (s, p), why in problems.items() if p is not None and why is None}
    name = "thin" if o.quick and o.shape is None else o.shape or "olmoe"
    model = make(o.cache, name, o.layers, o.tag, formats, gguf_python, o.routing)
    about = {
        "command": "python -m benchmarks " + shlex.join(arguments),
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "machine": machine(),
        "threads": o.threads,
        "model": model.name,
        "routing": model.routing,
    }
    try:
        results = Results(o.out, about)
    except OtherModel as error:
        raise SystemExit(str(error)) from error
    waiting = [
        job
        for job, why in problems.items()
        if why is None
        and (
            o.again
            or not results.has(job[0], _name(job[1]))
            or results.is_noisy(job[0], _name(job[1]), o.again_above)
        )
    ]
    fixed_s = o.row_limit or (_QUICK_ROW_S if o.quick else _ALL_ROW_S if o.all else None)
    layers = model.race.config["num_hidden_layers"]
    expected = [_expected_s(job, layers) for job in waiting]
    most = len(waiting) * (fixed_s or _ALL_ROW_S)
    if fixed_s is None:
        most = min(most, 60 * o.minutes)
    print(
        f"{model.name}: {len(waiting)} rows to run, {len(jobs) - len(waiting)} there or impossible;"
        f" about {min(most, sum(expected)) / 60:.0f} minutes, at most {most / 60:.0f}",
        file=sys.stderr,
    )
    if o.dry_run:
        return
    for job, why in problems.items():
        if why is not None:
            results.put(job[0], _name(job[1]), {"status": why})
    model.manifest()
    for weights in sorted(formats - {"served"}):
        model.file(weights)
    start = time.monotonic()
    end = start + (o.stop_after or float("inf"))
    for number, (scenario, peer) in enumerate(waiting):
        if time.monotonic() + expected[number] > end:
            print(f"stopped before row {number + 1}; the same command goes on", file=sys.stderr)
            break
        left = start + 60 * o.minutes - time.monotonic()
        limit_s = fixed_s or _limit_s(expected[number:], left)
        row = run(Bench(model, o.threads, limit_s, here), peer, scenario)
        results.put(scenario, _name(peer), row)
        speed = f"{row['tokens_per_s']} tokens/s" if row["status"] == "ok" else row["status"]
        print(
            f"{number + 1}/{len(waiting)} {scenario.name}, {_name(peer)}: {speed}", file=sys.stderr
        )
    if waiting and any(
        scenario.place == "ram"
        for scenario in chosen
        for _ in missed(scenario, results.rows(scenario))
    ):
        results.put_profile(profile(model, o.threads))
    text = markdown(results, chosen)
    o.out.with_suffix(".md").write_text(text)
    if o.pictures:
        rows = [row for scenario in chosen for row in results.rows(scenario)]
        draw(rows, o.out.with_suffix(".png"))
    print(text, end="")


def _selection(o: argparse.Namespace) -> list[Scenario]:
    chosen = (
        scenarios.everything() if o.all else scenarios.quick() if o.quick else scenarios.default()
    )
    return [s for s in chosen if all(word in s.name for word in o.only)]


def _limit_s(expected: Sequence[float], left: float) -> float:
    """Return the seconds of the next row: its share of the time left, by what rows will take.

    A row that is expected to be short gets no less than an equal share.
    """
    share = max(1 / len(expected), expected[0] / sum(expected))
    return min(_ALL_ROW_S, max(1.0, share * left))


def _expected_s(job: Job, layers: int) -> float:
    """Estimate the seconds of a row with all its rounds."""
    scenario, peer = job
    prompt, decode, short = _PACE.get(_name(peer), _OTHER_PACE)
    turns = 2 if scenario.moment == "second" else 1
    step = short if scenario.memory is not None else decode
    tokens = scenario.batch * (scenario.prompt * prompt + scenario.decode * step)
    starts = ROUNDS if scenario.moment == "cold" else 1
    return starts * _START_S + ROUNDS * turns * layers * tokens


def _name(peer: Peer | None) -> str:
    return OURS if peer is None else peer.name


def _has_gpu() -> bool:
    import torch  # heavy, and --help does not need it

    return torch.cuda.is_available()


def _options(arguments: list[str]) -> argparse.Namespace:
    home = read_environment({**os.environ}).home / "benchmarks"
    names = [OURS, *PEERS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="minutes: whether everything works")
    size.add_argument("--all", action="store_true", help="the full product: days")
    parser.add_argument(
        "--only", action="append", default=[], help="scenarios with this in the name"
    )
    parser.add_argument(
        "--programs", type=lambda t: t.split(","), default=names, help=",".join(names)
    )
    parser.add_argument("--shape", choices=["thin", *SHAPES], help="default: olmoe; --quick: thin")
    parser.add_argument("--layers", type=int, help="default: as many as the disk affords")
    parser.add_argument(
        "--routing", default=ROUTINGS[0], choices=ROUTINGS, help="which experts tokens use"
    )
    parser.add_argument("--tag", default="q4", choices=("q4", "q8", "bf16"), help="ours")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--minutes",
        type=float,
        default=_MOST_MINUTES,
        help="of the default selection; in fewer, rows have fewer rounds",
    )
    parser.add_argument("--row-limit", type=float, metavar="SECONDS", help="of one row")
    parser.add_argument("--stop-after", type=float, metavar="SECONDS", help="a later run goes on")
    parser.add_argument("--again", action="store_true", help="also rows that are there")
    parser.add_argument(
        "--again-above",
        type=float,
        metavar="CORES",
        default=float("inf"),
        help="also rows that failed, or during which others used more processors",
    )
    parser.add_argument("--dry-run", action="store_true", help="says how long it would take")
    pair = {"action": "append", "type": _pair, "default": []}
    parser.add_argument("--python", **pair, metavar="llama_cpp=PATH", help="a peer's Python")
    parser.add_argument("--server", **pair, metavar="ollama=URL", help="where a peer's server is")
    parser.add_argument("--served", **pair, metavar="ollama=MODEL", help="the model it serves")
    parser.add_argument("--cache", type=Path, default=home, help="models, GBs; may be deleted")
    parser.add_argument("--out", type=Path, default=Path("benchmarks.json"), help="and .md, .png")
    parser.add_argument("--no-pictures", dest="pictures", action="store_false")
    o = parser.parse_args(arguments)
    for name in o.programs:
        if name not in names:
            parser.error(f"{name!r} is not one of {', '.join(names)}")
    return o


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value
