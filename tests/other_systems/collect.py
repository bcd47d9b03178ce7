"""Collect the suite on Linux, then where this process lacks what another system lacks.

The first time imports every library: those of Linux may not be importable later. Then the modules
of moeinf and of the tests are imported again. At last one file runs, to see what it is skipped for.

    python -m tests.other_systems.collect OUT darwin|win32 [PATH ...]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.other_systems.imitated import take_away

OPTIONS = ("-qq", "-s", "-p", "no:cacheprovider", "--timeout=0", "-m", "")
OURS = ("moeinf", "tests", "scripts", "benchmarks")
KEPT = ("moeinf.errors", "moeinf.native", "tests.other_systems")  # compiled, or in use
ONE = "tests/runtime/engine/test_moving_memory.py"  # its tests open engines, or are of Linux


class Report:
    """The findings of pytest. faults: files that could not be collected, with their errors."""

    def __init__(self) -> None:
        self.items: list[str] = []
        self.faults: list[str] = []
        self.marked = 0  # those skipped by the mark `linux`
        self.outcomes: list[tuple[str, str]] = []  # of a run: what happened, and why

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.faults.append(f"{report.nodeid}: {str(report.longrepr)[-600:]}")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = [item.nodeid for item in session.items]
        skips = [item.get_closest_marker("skip") for item in session.items]
        reasons = [str(skip.args[0]) for skip in skips if skip is not None and skip.args]
        self.marked = sum(reason.startswith("needs Linux: ") for reason in reasons)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed" or report.when == "call":
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            self.outcomes.append((report.outcome, str(why)[-600:]))

    def document(self) -> dict[str, Any]:
        """Return what is told about a system."""
        return {name: value for name, value in vars(self).items() if name != "items"} | {
            "count": len(self.items)
        }


def collect(*arguments: str) -> Report:
    """Return what pytest finds in this process as it is now."""
    report = Report()
    pytest.main([*OPTIONS, *arguments], plugins=[report])
    return report


def forget() -> None:
    """Forget our modules, so that they are imported again."""
    for name in list(sys.modules):
        if name.partition(".")[0] in OURS and not name.startswith(KEPT) and name != "moeinf":
            del sys.modules[name]


def main(out: str, system: str, paths: Sequence[str]) -> None:
    here = collect("--collect-only", *paths)
    forget()
    take_away(system)
    there = collect("--collect-only", *paths)
    document = {
        "linux": here.document(),
        system: there.document(),
        "missing": sorted(set(here.items) - set(there.items))[:20],
        "run": collect(ONE).outcomes if system == "win32" else [],
    }
    Path(out).write_text(json.dumps(document))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
