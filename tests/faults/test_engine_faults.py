"""Reads and allocations that fail at any point of a generation; signals at every token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.conftest import STRIDE, Tally

REST = ("eio", "memory", "eio thrice", "short", "slow")
INSIDE = Path(__file__).with_name("inside.py")


@pytest.mark.linux("preloads a library")
@pytest.mark.parametrize(
    "what",
    ["flip", *(pytest.param(what, marks=pytest.mark.full) for what in REST)],
)
def test_a_generation_in_which_something_fails(
    what: str, every_point: bool, shim: Path, demo_home: Path, tally: Tally
) -> None:
    """One EIO, short reads and slow reads change nothing; a persistent error names the file."""
    few = 5 if what == "memory" else 41
    step = min(few, STRIDE) if every_point else few
    run = subprocess.run(
        [sys.executable, str(INSIDE), str(demo_home), what, str(step)],
        env={**os.environ, "LD_PRELOAD": str(shim)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout)
    assert found["points"] > 40
    for outcome, count in found["outcomes"].items():
        for _ in range(count):
            tally(outcome)
