"""Collect the suite where this process lacks what macOS lacks, and then what Windows lacks.

Libraries are imported first, as on Linux: some may not be importable later. Before each system the
modules of moeinf and of the tests are forgotten, and imported again.

    python -m tests.other_systems.collect OUT [PATH ...]

With paths, these are collected on Linux, too. At last one file then runs, to see what it is skipped
for on Windows. The run that the whole suite is a part of collects it on Linux.
"""

from __future__ import annotations

import gc
import importlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.other_systems.imitated import SYSTEMS, take_away

OPTIONS = ("-qq", "-s", "-p", "no:cacheprovider", "--timeout=0", "-m", "")
OURS = ("moeinf", "tests", "scripts", "benchmarks")
KEPT = ("moeinf.errors", "moeinf.native", "tests.other_systems")  # compiled, or in use
ROOT = Path(__file__).parents[2]
FOLDERS = ("api", "cli", "models", "offload", "runtime", "server", "tests")
IMPORT = re.compile(r"^(?:from|import) ([\w.]+)", re.MULTILINE)
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


def libraries() -> Iterator[str]:
    """Yield the modules of others that our files import when they are imported."""
    paths = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    names = {name for path in paths for name in IMPORT.findall(path.read_text(encoding="utf-8"))}
    yield from sorted(name for name in names if name.partition(".")[0] not in OURS)


def forget() -> None:
    """Forget our modules, so that they are imported again."""
    for name in list(sys.modules):
        if name.partition(".")[0] in OURS and not name.startswith(KEPT) and name != "moeinf":
            del sys.modules[name]


def main(out: str, paths: Sequence[str]) -> None:
    gc.disable()  # nearly all that a collection imports stays to the end
    found = {"linux": collect("--collect-only", *(paths or [ONE]))}  # imports plugins of pytest
    if not paths:
        for name in libraries():
            with suppress(ImportError, OSError):  # a file that needs it tells the error
                importlib.import_module(name)
    for system in SYSTEMS:
        forget()
        take_away(system)
        found[system] = collect("--collect-only", *paths)
    document = {system: report.document() for system, report in found.items()}
    if paths:
        document["missing"] = {
            system: sorted(set(found["linux"].items) - set(found[system].items))[:20]
            for system in SYSTEMS
        }
        document["run"] = {SYSTEMS[-1]: collect(ONE).outcomes}
    Path(out).write_text(json.dumps(document))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
