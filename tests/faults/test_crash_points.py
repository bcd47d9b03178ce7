"""kill -9, power cuts and full disks at calls that change the disk: old or new state only.

The default is a few points and `-m full` more. `python scripts/faults.py` runs every one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.cli import warm
from tests.faults.conftest import EVERY, Tally

SCRIPT = Path(__file__).parents[2] / "scripts" / "crash_points.py"


HOW = ["kill", "power", "names", pytest.param("full", id="no-space")]
FEW = [
    ("pull", 13, "kill"), ("cp", 7, "power"), ("rm", 5, "names"), ("eamc", 1, "full"),
    ("rewrite", 3, "kill"), ("export", 1, "power"), ("conversation", 1, "names"),
    ("first talk", 1, "full"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "every", "how"), FEW)
def test_before_or_after(what: str, every: int, how: str, tally: Tally) -> None:
    assert tried(what, how, every, tally) > 1


@pytest.mark.full
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("what", "every"),
    [
        ("pull", 5), ("cp", 3), ("rm", 3), ("eamc", 1), ("rewrite", 2), ("export", 1),
        ("conversation", 1), ("first talk", 2),
    ],
)  # fmt: skip
def test_at_more_points(what: str, every: int, how: str, tally: Tally) -> None:
    assert tried(what, how, 1 if EVERY else every, tally) > (10 if what in ("pull", "cp") else 0)


def tried(what: str, how: str, every: int, tally: Tally) -> int:
    """Fail at every so many points; return how many. Each outcome must be the old or new state."""
    command = [str(SCRIPT), "--json", "--what", what, "--how", how, "--every", str(every)]
    run = warm.run(command, os.environ)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(run.stdout)
    assert found["wrong"] == []
    for outcome, count in found["outcomes"].items():
        for _ in range(count):
            tally(outcome)
    return int(found["tried"])
