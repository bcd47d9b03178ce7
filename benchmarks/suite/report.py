"""The suite's results: one JSON that grows row by row, and one Markdown table."""

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
        found = [row for row in self._rows.values() if scenario == Scenario.of(row)]
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


def _key(scenario: Scenario, program: str) -> str:
    return f"{scenario.name} | {program}"
