"""Commit subjects: at most 72 characters, `area: verb object`, no semicolon."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAST_BEFORE = "47deca1e"  # the rule holds for later commits
FORM = re.compile(r"[\w./-]+(?:,? [\w./-]+)*: [a-z][^;]*[^.;]")


def is_right(subject: str) -> bool:
    return len(subject) <= 72 and FORM.fullmatch(subject) is not None


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)


def test_subjects_of_commits() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no git history: an sdist")
    if git("merge-base", "--is-ancestor", LAST_BEFORE, "HEAD").returncode:
        pytest.skip(f"no git history back to {LAST_BEFORE}: a shallow clone")
    shown = git("log", "--no-merges", "--format=%h %s", f"{LAST_BEFORE}..HEAD")
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert [line for line in lines if not is_right(line.partition(" ")[2])] == []


@pytest.mark.parametrize(
    ("subject", "right"),
    [
        ("gpu: raise OutOfDeviceMemory when dense weights do not fit at load", True),
        ("tests/house: check the words of documents", True),
        ("docs, tests: name what moved", True),
        ("Want of device memory at load asks for less of it; and more", False),
        ("docs: name it; fix it", False),
        ("docs: Name it", False),
        ("docs: name it.", False),
        ("docs: " + "a" * 67, False),
    ],
)
def test_what_is_right(subject: str, right: bool) -> None:
    assert is_right(subject) is right
