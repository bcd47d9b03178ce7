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

ROOT = Path(__file__).parents[2]
SOME = ("tests/runtime/files", "tests/native/test_slot_pool.py")


def collected(system: str, out: Path, *paths: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.other_systems.collect", str(out), system, *paths]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert out.exists(), ended.stdout[-2000:] + ended.stderr[-2000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def check(found: dict[str, Any], system: str) -> None:
    here, there = found["linux"], found[system]
    assert here["faults"] == there["faults"] == []
    assert here["marked"] == 0
    assert there["marked"] > 0
    assert there["count"] <= here["count"]


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_some_folders_are_collected(system: str, tmp_path: Path) -> None:
    """On Windows an engine is refused. A test that ends in that error is skipped with its words."""
    found = collected(system, tmp_path / "found.json", *SOME)
    check(found, system)
    assert found["missing"] == []
    if system == "win32":
        assert {outcome for outcome, _ in found["run"]} == {"skipped", "passed"}
        reasons = [why for _, why in found["run"]]
        assert any("needs Linux: this needs file locks" in why for why in reasons)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_the_suite_is_collected(system: str, tmp_path: Path) -> None:
    found = collected(system, tmp_path / "found.json")
    check(found, system)
    assert found["linux"]["count"] > 10_000
