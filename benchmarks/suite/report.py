"""The suite's results: one JSON that grows row by row, and one Markdown table."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.suite.figures import OURS, Row
from benchmarks.suite.goals import MISSED_HEAD, Interval, interval, missed, times_as_fast
from benchmarks.suite.scenarios import Scenario
from moeinf.runtime.sizes import format_bytes

Result = dict[str, Any]
_HEAD = (
    "program|tokens/s|rounds|× llama.cpp|÷ floor|TPOT ms (p95)|TTFT ms|hits|MB read/token"
    "|peak memory|others"
).split("|")
_NOTES = """\
Each cell with brackets is a median, with the least and the most of its rounds. Where fewer than
five rounds fit into a row's time, the tokens of a round are cut into equal parts. "× llama.cpp"
divides by its fastest setting. It brackets our slowest round by its fastest one, and the reverse.
"""
_PROFILE = """\
The shares of a token's time: its bytes at the speed that RAM had, waiting for the drive with
nothing to compute, and deciding what to load and evict. The rest is the kernels' distance from that
speed, attention, and Python.
"""


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
        self.about = {"profile": found["about"].get("profile"), **about}

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
        self._write()

    def _write(self) -> None:
        text = json.dumps({"about": self.about, "rows": self._rows}, indent=1) + "\n"
        partial = self.path.with_suffix(".partial")
        partial.write_text(text)
        partial.replace(self.path)

    def put_profile(self, text: str) -> None:
        self.about["profile"] = text
        self._write()

    def rows(self, scenario: Scenario) -> list[Row]:
        """Return the rows of a scenario, ours first."""
        found = [row for row in self._rows.values() if scenario == Scenario.of(row)]
        return sorted(found, key=lambda row: row["program"] != OURS)


def markdown(results: Results, scenarios: Sequence[Scenario]) -> str:
    """Return a table of the rows; below it, the programs without a row and the reasons."""
    lines = [*_header(results.about), "", *_NOTES.splitlines(), ""]
    lines += _table_head("scenario", *_HEAD)
    without: dict[tuple[str, str], list[str]] = defaultdict(list)
    for scenario in scenarios:
        rows = results.rows(scenario)
        for row in rows:
            if not row.get("ran"):
                without[row["program"], row["status"]].append(scenario.where)
            else:
                lines.append(_line(scenario.name, *_cells(row, times_as_fast(rows))))
    lines += _goals(results, scenarios)
    if without:
        lines += ["", "Without a row:", ""]
    for (program, why), places in without.items():
        lines.append(f"- {program} ({', '.join(dict.fromkeys(places))}): {why}")
    return "\n".join(lines) + "\n"


def _header(about: Result) -> list[str]:
    machine = about["machine"]
    cores, memory = machine["cores"], format_bytes(machine["memory_bytes"])
    return [
        f"# {machine['cpu']}",
        "",
        f"- {cores} cores, {memory} RAM, {machine['system']}",
        f"- moeinf {machine['moeinf']}, torch {machine['torch']}; threads: {about['threads']}",
        f"- model {about['model']}; routing: {about['routing']}",
        f"- {about['when']}: `{about['command']}`",
    ]


def _goals(results: Results, scenarios: Sequence[Scenario]) -> list[str]:
    """Return the goals that were missed, each with the profile of its row."""
    found = [one for s in scenarios for one in missed(s, results.rows(s))]
    if not found:
        return ["", "No goal was missed."]
    lines = ["", "## Goals that were missed", "", *_PROFILE.splitlines(), ""]
    lines += [*_table_head(*MISSED_HEAD), *(_line(*one.cells()) for one in found)]
    if text := results.about.get("profile"):
        lines += ["", "A token in RAM by pieces, in a separate run that times each piece:", ""]
        lines += [f"    {line}" for line in text.splitlines()]
    return lines


def _table_head(*names: str) -> list[str]:
    return [_line(*names), f"|{'---|' * len(names)}"]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(row: Row, times: Interval | None) -> list[str]:
    if row["status"] != "ok":
        return [row["program"], row["status"], *[""] * (len(_HEAD) - 2)]
    name = row["program"] + (f", {row['note']}" if "note" in row else "")
    rounds = f"{row['rounds']}" + (f" in {row['parts']}" if row["parts"] > row["rounds"] else "")
    return [
        name if row["forced"] else f"{name} (its own tokens)",
        str(interval(row, "tokens_per_s")),
        rounds,
        _or_dash(times if row["program"] == OURS else None, str),
        str(interval(row, "over_floor")) if "over_floor" in row else "-",
        f"{row['tpot_ms_median']:.1f} ({row['tpot_ms_p95']:.1f})",
        f"{row['ttft_ms']:.0f} ({row['ttft_ms_least']:.0f} to {row['ttft_ms_most']:.0f})",
        _or_dash(row["hit_rate"], lambda rate: f"{rate:.1%}"),
        _or_dash(row["bytes_per_token"], lambda count: f"{count / 1e6:.1f}"),
        _or_dash(row["peak_bytes"], format_bytes),
        _or_dash(row.get("others_cores"), lambda cores: f"{cores:.1f}"),
    ]


def _or_dash(value: Any, text: Any) -> str:
    return "-" if value is None else str(text(value))


def _key(scenario: Scenario, program: str) -> str:
    return f"{scenario.name} | {program}"
