"""Runs the command line as people do: as a process of its own, with its own home."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

SCHEMAS = Path(__file__).parents[2] / "docs/schemas"
COMMAND = [sys.executable, "-c", "from moeinf.cli.entry import main; main()"]


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


def environment(home: Path) -> dict[str, str]:
    """No server listens at its MOEINF_HOST, whatever runs on this machine."""
    own = {"MOEINF_HOME": str(home), "MOEINF_HOST": "127.0.0.1:1"}
    return {**os.environ, **own, "NO_COLOR": "1", "COLUMNS": "200"}


def check_document(name: str, document: Any) -> None:
    """The document is as docs/schemas/NAME.json says: nothing missing, nothing unsaid."""
    schema: dict[str, Any] = json.loads((SCHEMAS / f"{name}.json").read_text())
    Draft202012Validator.check_schema(schema)
    problems = [
        f"{error.json_path}: {error.message}"
        for error in Draft202012Validator(schema).iter_errors(document)
    ]
    assert not problems, f"{name}: {problems}"


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
