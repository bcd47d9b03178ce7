"""Test files that are no regular files as options, and odd folder names in completion."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from moeinf.cli.options import installed_models
from tests.cli.conftest import environment
from tests.cli.warm import run


@pytest.mark.parametrize(
    "words",
    [
        ["run", "demo", "17+25=", "--format", "FILE"],
        ["eamc", "import", "demo", "FILE"],
        ["eval", "demo", "--file", "FILE"],
        ["simulate", "FILE"],
        ["bench", "demo", "--replay", "FILE"],
    ],
)
def test_a_fifo_is_refused(words: list[str], demo_home: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for file in (str(tmp_path / "fifo"), "/dev/zero"):
        done = run([file if word == "FILE" else word for word in words], environment(demo_home))
        assert done.returncode in (1, 2)
        assert "not a regular file" in done.stderr or "is not a file" in done.stderr


def test_simulate_looks_at_the_first_bytes_only(tmp_path: Path) -> None:
    """A file of a terabyte that is no recording is refused before it is read."""
    with (tmp_path / "large.eam").open("wb") as file:
        file.truncate(1 << 40)
    done = run(["simulate", str(tmp_path / "large.eam")], environment(tmp_path))
    assert done.returncode == 1
    assert "not a recording" in done.stderr


def test_completion_prints_valid_names(
    demo_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("demo", "a\x1b]0;x\x07", "b$(id)", "c\nd"):
        shutil.copytree(demo_home / "models/demo/bf16", tmp_path / "models" / name / "bf16")
    monkeypatch.setenv("MOEINF_HOME", str(tmp_path))
    assert installed_models("") == ["demo"]
