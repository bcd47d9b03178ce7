"""Test that pytest finds the suite where Windows or macOS is imitated, and skips what needs Linux.

A file that needs a module of Linux is skipped whole there; its tests are the missing ones.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.other_systems.collect import libraries
from tests.other_systems.imitated import LIBRARIES, MODULES, NAMES, SYSTEMS

ROOT = Path(__file__).parents[2]
SOME = ("tests/runtime/files", "tests/native/test_slot_pool.py")


def collected(out: Path, *paths: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.other_systems.collect", str(out), *paths]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert out.exists(), ended.stdout[-2000:] + ended.stderr[-2000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_each_system_lacks_what_the_one_before_lacks() -> None:
    """One process imitates them one after the other, and nothing comes back."""
    first, last = SYSTEMS
    assert set(MODULES[first].split()) <= set(MODULES[last].split())
    for module, names in NAMES[first].items():
        assert set(names.split()) <= set(NAMES[last][module].split()), module
    for library, names in LIBRARIES[first].items():
        assert set(names.split()) <= set(LIBRARIES[last][library].split()), library


def test_libraries_are_those_of_others() -> None:
    found = list(libraries())
    assert {"pexpect", "torch", "transformers", "uvicorn"} <= set(found)
    assert not [name for name in found if name.startswith(("moeinf", "tests", "scripts"))]


def test_some_folders_are_collected(tmp_path: Path) -> None:
    """On Windows an engine is refused. A test that ends in that error is skipped with its words."""
    found = collected(tmp_path / "found.json", *SOME)
    here = found["linux"]
    assert (here["faults"], here["marked"]) == ([], 0)
    for system in SYSTEMS:
        there = found[system]
        assert (there["faults"], found["missing"][system]) == ([], [])
        assert there["marked"] > 0
        assert there["count"] == here["count"]
    outcomes = found["run"]["win32"]
    assert {outcome for outcome, _ in outcomes} == {"skipped", "passed"}
    assert any("needs Linux: this needs file locks" in why for _, why in outcomes)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_suite_is_collected(tmp_path: Path) -> None:
    found = collected(tmp_path / "found.json")
    assert [found[system]["faults"] for system in SYSTEMS] == [[], []]
    macos, windows = (found[system] for system in SYSTEMS)
    assert 0 < windows["marked"] <= macos["marked"]  # it skips more files whole
    assert 10_000 < windows["count"] <= macos["count"]
