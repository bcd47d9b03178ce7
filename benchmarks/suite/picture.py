"""Draw the suite's results: python -m benchmarks.suite.picture (docs/suite.csv → docs/suite.png).

With a run's --out (`python -m benchmarks.suite.picture benchmarks.json`), it first writes the run's
rows to docs/suite.csv.

The picture is made for a width of 800 pixels, which a page gives it. matplotlib is imported where
it draws.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.suite.figures import Row
from benchmarks.suite.scenarios import Scenario

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOCS = Path(__file__).parents[2] / "docs"
DATA, PICTURE = DOCS / "suite.csv", DOCS / "suite.png"
INCHES = (8, 8)  # of 100 pixels on a page; the file has twice as many
# The colours of docs/memory.svg; other programs get matplotlib's.
_COLOURS = {
    "moeinf": "#0969da",
    "llama.cpp": "#cf222e",
    "llama.cpp no-repack": "#e16f24",
    "accelerate disk": "#6e7781",
}
_OTHER_COLOURS = ("#8250df", "#1a7f37", "#bf3989", "#9a6700", "#0a3069")


_NAMES = ("prompt", "decode", "batch", "moment", "program", "status")
_FIGURES = (
    *(f"tokens_per_s{end}" for end in ("", "_least", "_most")), "rounds", "parts",
    *("tpot_ms_median", "tpot_ms_p95", "ttft_ms", "floor_ms", "over_floor", "over_floor_least"),
    *("over_floor_most", "others_cores"),
)  # fmt: skip
COLUMNS = ("memory_percent", *_NAMES, *_FIGURES, "hit_percent", "read_mb_per_token", "peak_mib")


def read(path: Path) -> list[Row]:
    """Return the rows of docs/suite.csv, as far as the picture needs them."""
    rows: list[Row] = []
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            memory = int(line["memory_percent"])
            row: Row = {name: int(line[name]) for name in ("prompt", "decode", "batch")}
            row |= {name: line[name] for name in ("moment", "program", "status")}
            row |= {"gpu": None, "memory": None if memory == 100 else memory}
            if row["status"] == "ok":
                row |= {name: float(line[name]) for name in ("tokens_per_s", "ttft_ms")}
            rows.append(row)
    return rows


def table(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the rows of docs/suite.csv: those of programs that have run, without a GPU."""
    found = []
    for row in rows:
        if not row.get("ran") or row["gpu"] is not None:
            continue
        line: dict[str, Any] = {"memory_percent": row["memory"] or 100}
        line |= {name: row[name] for name in _NAMES}
        if row["status"] == "ok":
            hits, read = row["hit_rate"], row["bytes_per_token"]
            line |= {name: row.get(name) for name in _FIGURES}
            line["hit_percent"] = None if hits is None else round(100 * hits, 1)
            line["read_mb_per_token"] = None if read is None else round(read / 1e6, 1)
            line["peak_mib"] = None if row["peak_bytes"] is None else row["peak_bytes"] >> 20
        found.append(line)
    return found


def write(rows: Iterable[Row], path: Path) -> None:
    """Write docs/suite.csv."""
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        lines.writeheader()
        lines.writerows(table(rows))


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the picture of all rows that were measured."""
    from matplotlib import pyplot

    made = figure(rows)
    made.savefig(path, dpi=200)
    pyplot.close(made)


def figure(rows: Sequence[Row]) -> Figure:
    """Draw tokens per second by scenario and by memory, and the time to first token by prompt."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    done = [row for row in rows if row["status"] == "ok" and row["gpu"] is None]
    names = dict.fromkeys(row["program"] for row in done)
    others = iter(_OTHER_COLOURS * len(names))
    colours = {name: _COLOURS.get(name) or next(others) for name in names}
    made, axes = pyplot.subplot_mosaic(
        [["bars", "bars"], ["memory", "first"]], figsize=INCHES, layout="constrained"
    )
    _bars(axes["bars"], done, colours)
    _lines(axes["memory"], done, colours, "memory")
    _lines(axes["first"], done, colours, "prompt")
    for axis in axes.values():
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    handles = [Line2D([], [], color=colour, lw=6) for colour in colours.values()]
    made.legend(handles, list(colours), loc="outside upper center", ncols=3)
    return made


def _bars(axis: Axes, rows: Sequence[Row], colours: dict[str, str]) -> None:
    """Draw a group of bars per scenario without a limit."""
    here = [row for row in rows if row["memory"] is None]
    scenarios = list(dict.fromkeys(Scenario.of(row) for row in here))
    programs = [name for name in colours if any(row["program"] == name for row in here)]
    width = 0.8 / max(1, len(programs))
    for row in here:
        place = scenarios.index(Scenario.of(row)) + width * programs.index(row["program"])
        axis.bar(place, row["tokens_per_s"], width, color=colours[row["program"]])
    middle = width * (len(programs) - 1) / 2
    ticks = [number + middle for number in range(len(scenarios))]
    axis.set_xticks(ticks, [_label(one) for one in scenarios])
    axis.set(title="All in RAM, by tokens of prompt + answer", ylabel="tokens/s")


def _label(scenario: Scenario) -> str:
    """Return the lengths, and on a second line what differs from one warm conversation."""
    moment = {"warm": "", "cold": "cold", "second": "2nd turn"}[scenario.moment]
    batch = f"batch {scenario.batch}" if scenario.batch > 1 else ""
    return f"{scenario.prompt}+{scenario.decode}\n{batch or moment}"


def _lines(axis: Axes, rows: Sequence[Row], colours: dict[str, str], size: str) -> None:
    """Draw a line per program over `size`, with all else as in the scenario by default.

    A first token does not depend on the answer's length: without an answer of 32 tokens, a longer
    one counts.
    """
    from matplotlib.ticker import LogLocator

    lines: dict[str, dict[float, float]] = {name: {} for name in colours}
    for row in rows:
        answer = row["decode"] if size == "prompt" else Scenario.decode
        alone: dict[str, Any] = {"decode": answer, size: row[size]}
        if Scenario.of(row) == Scenario(**alone):
            x, y = _point(row, size)
            lines[row["program"]].setdefault(x, y)
    for program, points in lines.items():
        if points:
            axis.plot(*zip(*sorted(points.items()), strict=True), "o-", color=colours[program])
    words = {"title": "Limited memory, 512+32", "xlabel": "experts that fit, %"}
    words |= {"ylabel": "tokens/s"}
    if size == "prompt":
        words = {"title": "First token", "xlabel": "tokens of prompt", "ylabel": "seconds"}
    axis.set(**words, xscale="log", yscale="log")
    ticks = sorted({x for points in lines.values() for x in points})
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")


def _point(row: Row, size: str) -> tuple[float, float]:
    if size == "memory":
        return row["memory"] or 100, row["tokens_per_s"]
    return row["prompt"], row["ttft_ms"] / 1e3


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["rows"].values(), DATA)
    draw(read(DATA), PICTURE)
