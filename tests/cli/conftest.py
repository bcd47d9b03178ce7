"""Runs the command line as people do: as a process of its own, with its own home."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-c", "from moeinf.cli.main import main; main()"]


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "MOEINF_HOME": str(home), "NO_COLOR": "1", "COLUMNS": "200"}


Command = Callable[..., Result]


def command_in(home: Path) -> Command:
    def run(*arguments: str, stdin: str | None = None, **variables: str) -> Result:
        done = subprocess.run(
            [*COMMAND, *arguments],
            env={**environment(home), **variables},
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            check=False,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def moeinf(demo_home: Path) -> Command:
    """moeinf("run", "demo", "17+25=", stdin=None, MOEINF_DEBUG="1") in the shared home."""
    return command_in(demo_home)
