"""kill -9, power cuts and full disks at calls that change the disk: old or new state only.

The default is some of the points. `-m full` runs every one, like `python scripts/crash_points.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.conftest import Tally

SCRIPT = Path(__file__).parents[2] / "scripts" / "crash_points.py"


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("what", "every"),
    [
        ("pull", 13), ("cp", 7), ("rm", 5), ("eamc", 1), ("rewrite", 3), ("export", 1),
        ("conversation", 1), ("first talk", 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("how", ["kill", "power", "names", pytest.param("full", id="no-space")])
def test_before_or_after(what: str, every: int, how: str, every_point: bool, tally: Tally) -> None:
    every = 1 if every_point else every
    command = [sys.executable, str(SCRIPT), "--json", "--what", what, "--how", how]
    run = subprocess.run(
        [*command, "--every", str(every)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(run.stdout)
    assert found["wrong"] == []
    assert found["tried"] > (20 if every_point and what in ("pull", "cp") else 1)
    for outcome, count in found["outcomes"].items():
        for _ in range(count):
            tally(outcome)
