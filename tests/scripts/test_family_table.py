"""Test that docs/families.md lists the tests that pytest collects, without an empty cell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.family_table import COLUMNS, REASONS, Collected, lacking, written
from tests.runtime.text.family_formats import FORMATS

ROOT = Path(__file__).resolve().parents[2]


def test_the_document_is_up_to_date() -> None:
    """Also `-m full -k FAMILY` finds a test of every family."""
    command = [sys.executable, "-m", "scripts.family_table", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def filled() -> Collected:
    found = Collected()
    for family in FORMATS:
        for what, tests in COLUMNS.items():
            if (family, what) not in REASONS:
                found.cases[tests[0]][family] += [f"[{number}-{what}]" for number in range(2)]
    for family in ("nllb-moe", "switch_transformers"):  # what they share with decoders
        found.cases[COLUMNS["greedy"][0]].pop(family, None)
    return found


def test_a_cell_needs_a_case_or_a_reason() -> None:
    found = filled()
    written(found)
    found.cases[COLUMNS["GPU"][0]].pop("laguna")
    with pytest.raises(ValueError, match="laguna: GPU has 0 cases"):
        written(found)


def test_what_lacks_a_config_is_listed() -> None:
    assert lacking() == ["`ernie-4.5-300b-a47b`", "`k-exaone-236b-a23b`"]
