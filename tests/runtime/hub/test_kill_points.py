"""kill -9 at writes, fsyncs, renames, links and unlinks of pull, cp and rm: never half."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "kill_points.py"


@pytest.mark.parametrize(
    ("options", "least_points"),
    [
        (["--every", "2"], 45),
        (["--hub", "--every", "4"], 95),
        (["--full", "--every", "2"], 45),
        (["--hub", "--full", "--every", "4"], 95),
        (["--what", "cp", "--every", "2"], 20),
        (["--what", "cp", "--full", "--every", "2"], 20),
        (["--what", "rm", "--every", "2"], 20),
    ],
)
def test_every_outcome_is_absent_or_complete(options: list[str], least_points: int) -> None:
    """The script tries all points when it is run by hand."""
    run = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    found = re.search(r"(\d+) points", run.stdout)
    assert found, run.stdout
    points, outcomes = int(found[1]), re.findall(r"(\d+) (?:unharmed )?(\w+)", run.stdout)
    counts = [int(count) for count, outcome in outcomes if outcome in ("absent", "complete")]
    assert points >= least_points
    assert sum(counts) >= len(range(1, points, int(options[-1])))
    assert len(counts) >= 2
