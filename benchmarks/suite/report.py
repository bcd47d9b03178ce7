"""The suite's results: one JSON that grows row by row, one Markdown table, one picture.

matplotlib is imported where a picture is drawn.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.suite.row import OURS, Row
from benchmarks.suite.scenarios import Scenario
from moeinf.runtime.sizes import format_bytes

Result = dict[str, Any]
_HEAD = (
    "program|tokens/s|TPOT ms (p95)|TTFT ms|hits|MB read/token|peak memory|floor ms|÷ floor|others"
).split("|")


class OtherModel(ValueError):
    """The JSON is of another model or machine: its rows are not comparable with new ones."""


class Results:
    """The JSON file: about, and rows by scenario and program. A new row is written at once."""

    def __init__(self, path: Path, about: Result) -> None:
        """Read the file if it exists. Raises OtherModel."""
        self.path, self.about = path, about
        self._rows: dict[str, Row] = {}
        if not path.exists():
            return
        found = json.loads(path.read_text())
        for key in ("model", "machine"):
            if found["about"][key] != about[key]:
                raise OtherModel(f"{path} is of another {key}; give another --out, or delete it")
        self._rows = found["rows"]

    def has(self, scenario: Scenario, program: str) -> bool:
        """Return True when the row was measured, not only marked as impossible."""
        return bool(self._rows.get(_key(scenario, program), {}).get("ran"))

    def is_noisy(self, scenario: Scenario, program: str, cores: float) -> bool:
        """Return True when the row failed, or others used more than `cores` processors in it."""
        row = self._rows.get(_key(scenario, program), {})
        failed = row.get("status", "ok") != "ok" and cores < float("inf")
        return failed or (row.get("others_cores") or 0.0) > cores

    def get(self, scenario: Scenario, program: str) -> Row | None:
        return self._rows.get(_key(scenario, program))

    def put(self, scenario: Scenario, program: str, row: Row) -> None:
        self._rows[_key(scenario, program)] = {"program": program, **asdict(scenario), **row}
        text = json.dumps({"about": self.about, "rows": self._rows}, indent=1) + "\n"
        partial = self.path.with_suffix(".partial")
        partial.write_text(text)
        partial.replace(self.path)

    def rows(self, scenario: Scenario) -> list[Row]:
        """Return the rows of a scenario, ours first."""
        found = [row for row in self._rows.values() if scenario == _scenario(row)]
        return sorted(found, key=lambda row: row["program"] != OURS)


def markdown(results: Results, scenarios: Sequence[Scenario]) -> str:
    """Return a table of the rows; below it, the programs without a row and the reasons."""
    about = results.about
    lines = [
        f"`{about['command']}`, {about['when']}, {about['machine']['cpu']}, "
        f"{about['threads']} threads, model {about['model']}.",
        "",
        f"| {' | '.join(['scenario', *_HEAD])} |",
        f"|{'---|' * (1 + len(_HEAD))}",
    ]
    without: dict[tuple[str, str], list[str]] = defaultdict(list)
    for scenario in scenarios:
        for row in results.rows(scenario):
            if not row.get("ran"):
                without[row["program"], row["status"]].append(scenario.where)
            else:
                lines.append(f"| {' | '.join([scenario.name, *_cells(row)])} |")
    if without:
        lines += ["", "Without a row:", ""]
    for (program, why), places in without.items():
        lines.append(f"- {program} ({', '.join(dict.fromkeys(places))}): {why}")
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> list[str]:
    if row["status"] != "ok":
        return [row["program"], row["status"], *[""] * (len(_HEAD) - 2)]
    name = row["program"] + (f", {row['note']}" if "note" in row else "")
    floor = row.get("floor_ms")
    over = row["tpot_ms_median"] / floor if floor and row["program"] == OURS else None
    return [
        name if row["forced"] else f"{name} (its own tokens)",
        f"{row['tokens_per_s']:.2f}",
        f"{row['tpot_ms_median']:.1f} ({row['tpot_ms_p95']:.1f})",
        f"{row['ttft_ms']:.0f}",
        _or_dash(row["hit_rate"], lambda rate: f"{rate:.1%}"),
        _or_dash(row["bytes_per_token"], lambda count: f"{count / 1e6:.1f}"),
        _or_dash(row["peak_bytes"], format_bytes),
        _or_dash(floor, lambda ms: f"{ms:.1f}"),
        _or_dash(over, lambda times: f"{times:.2f}"),
        _or_dash(row.get("others_cores"), lambda cores: f"{cores:.1f}"),
    ]


def _or_dash(value: Any, text: Any) -> str:
    return "-" if value is None else str(text(value))


def draw(results: Results, scenarios: Sequence[Scenario], path: Path) -> None:
    """Draw tokens per second by scenario and by memory, and the time to first token by prompt."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for s in scenarios for row in results.rows(s) if row["status"] == "ok"]
    programs = list(dict.fromkeys(row["program"] for row in rows))
    figure, (bars, memory, first) = pyplot.subplots(1, 3, figsize=(15, 4.2))
    ram = [s for s in scenarios if s.place == "ram"]
    width = 0.8 / max(1, len(programs))
    for number, program in enumerate(programs):
        mine = [row for row in rows if row["program"] == program]
        style = {"label": program, "color": f"C{number}"}
        speed = {_scenario(row): row["tokens_per_s"] for row in mine}
        at = [i for i, s in enumerate(ram) if s in speed]
        if at:
            bars.bar([i + number * width for i in at], [speed[ram[i]] for i in at], width, **style)
        shares = [
            (row["memory"] or 100, row["tokens_per_s"])
            for row in mine
            if _scenario(row) == Scenario(memory=row["memory"])
        ]
        prompts = {
            row["prompt"]: row["ttft_ms"] / 1e3
            for row in mine
            if _scenario(row) == Scenario(prompt=row["prompt"], decode=row["decode"])
        }
        for axis, points in ((memory, shares), (first, list(prompts.items()))):
            if points:
                axis.plot(*zip(*sorted(points), strict=True), "o-", ms=4, **style)
    labels = [s.name.removeprefix("RAM, ").replace(", ", "\n") for s in ram]
    bars.set_xticks(range(len(ram)), labels, fontsize=6)
    bars.set(title="All in RAM", ylabel="tokens/s")
    memory.set(
        title="512 + 32 tokens", xlabel="memory for experts, %", ylabel="tokens/s", yscale="log"
    )
    first.set(
        title="First token", xlabel="tokens of prompt", ylabel="s", xscale="log", yscale="log"
    )
    for axis in (bars, memory, first):
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _scenario(row: Row) -> Scenario:
    names = ("memory", "gpu", "prompt", "decode", "batch", "moment")
    return Scenario(**{name: row[name] for name in names})


def _key(scenario: Scenario, program: str) -> str:
    return f"{scenario.name} | {program}"
