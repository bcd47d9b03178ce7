"""Test that the workflows name systems, Pythons, scripts and tests that exist, and all of them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text())
    for path in (ROOT / ".github/workflows").glob("*.yml")
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]


def matrix(workflow: str, job: str) -> Any:
    return WORKFLOWS[workflow]["jobs"][job]["strategy"]["matrix"]


def test_each_supported_python_is_tested_and_gets_wheels() -> None:
    assert matrix("tests", "fast")["python"] == PYTHONS
    built = PROJECT["tool"]["cibuildwheel"]["build"].split()
    assert built == [f"cp{version.replace('.', '')}-manylinux_*" for version in PYTHONS]
    assert PROJECT["project"]["requires-python"] == f">={PYTHONS[0]}"


def test_the_suite_runs_on_other_systems_and_wheels_are_built_on_both_machines() -> None:
    assert matrix("tests", "systems")["machine"] == ["macos-latest", "windows-latest"]
    runs = [step.get("run", "") for step in WORKFLOWS["tests"]["jobs"]["systems"]["steps"]]
    assert any(line.startswith("pytest") for line in runs)
    assert matrix("wheels", "wheels")["machine"] == ["ubuntu-latest", "ubuntu-24.04-arm"]


def test_windows_gets_a_compiler_that_can_build_it() -> None:
    settings = WORKFLOWS["tests"]["jobs"]["systems"]["env"]
    assert "'windows-latest' && 'g++'" in settings["CXX"]
    assert "-static" in settings["CMAKE_ARGS"]
    assert 'CMAKE_CXX_COMPILER_ID STREQUAL "MSVC"' in (ROOT / "CMakeLists.txt").read_text()


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_what_the_steps_run_exists(name: str) -> None:
    jobs = WORKFLOWS[name]["jobs"].values()
    lines = "\n".join(step.get("run", "") for job in jobs for step in job["steps"])
    named = re.findall(r"(?:python |pytest |^|\s)((?:scripts|tests|\.ci)/[\w/.]+)", lines)
    assert [path for path in named if not (ROOT / path).exists()] == []
    if "torch" in lines or "check_package" in lines:
        assert "https://download.pytorch.org/whl/cpu" in lines + str(WORKFLOWS[name].get("env"))
