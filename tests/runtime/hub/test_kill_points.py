"""kill -9 at writes, fsyncs, renames, links and unlinks of pull, cp and rm.

No model is ever half there.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.cli import warm
from tests.faults.conftest import EVERY

LONG = pytest.mark.timeout(1800)
SCRIPT = Path(__file__).parents[3] / "scripts" / "kill_points.py"


LEAST_POINTS = {
    "": 45,
    "--hub": 95,
    "--gguf": 30,
    "--hub --gguf": 50,
    "--what cp": 20,
    "--what rm": 20,
}
SOME = (("", 24), ("--what cp", 8), ("--what rm", 8))
ALL = ("", "--hub", "--full", "--hub --full", "--what cp", "--what cp --full", "--what rm")
GGUF = ("--gguf", "--hub --gguf", "--gguf --full", "--hub --gguf --full")
OFTEN = 1 if EVERY else 8
RARE = 1 if EVERY else 32  # the same points; each tries two tokenizers, for a second


@pytest.mark.parametrize(
    ("what", "every"),
    [
        *SOME,
        *(pytest.param(what, OFTEN, marks=[pytest.mark.full, LONG]) for what in ALL),
        *(pytest.param(what, RARE, marks=[pytest.mark.full, LONG]) for what in GGUF),
    ],
)
def test_every_outcome_is_absent_or_complete(what: str, every: int) -> None:
    """The default is some of the points; scripts/faults.py tries every one."""
    command = [str(SCRIPT), *what.split(), "--every", str(every)]
    least_points = LEAST_POINTS[what.replace("--full", "").strip()]
    run = warm.run(command, os.environ)
    assert run.returncode == 0, run.stdout + run.stderr
    found = re.search(r"(\d+) points", run.stdout)
    assert found, run.stdout
    points, outcomes = int(found[1]), re.findall(r"(\d+) (?:unharmed )?(\w+)", run.stdout)
    counts = [int(count) for count, outcome in outcomes if outcome in ("absent", "complete")]
    assert points >= least_points
    assert sum(counts) >= len(range(1, points, every))
    assert len(counts) >= 2
    if "--full" not in what:  # a kill met the model before it was there, and after
        assert re.search(r"\d+ absent", run.stdout)
        assert re.search(r"\d+ complete", run.stdout)
    if what in ("", "--hub"):
        kept = re.search(r"(\d+) kept files", run.stdout)  # which the rerun did not write again
        assert kept is not None
        assert int(kept[1]) >= 10
