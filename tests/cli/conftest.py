"""Run the command line: in this process, with its own home and streams.

Tests of signals, terminals, locks and closed streams start `COMMAND` as a process instead.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
from jsonschema import Draft202012Validator

from moeinf.cli.main import answer
from tests.cli import warm

SCHEMAS = Path(__file__).parents[2] / "docs/schemas"
COMMAND = [sys.executable, "-c", "from moeinf.cli.entry import main; main()"]


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


def environment(home: Path | str) -> dict[str, str]:
    """Return the variables of a home, with a MOEINF_HOST at which no server listens."""
    own = {"MOEINF_HOME": str(home), "MOEINF_HOST": "127.0.0.1:1"}
    return {**os.environ, **own, "NO_COLOR": "1", "COLUMNS": "200"}


def check_document(name: str, document: Any) -> None:
    """Check that a document matches docs/schemas/NAME.json: no field missing, none unknown."""
    schema: dict[str, Any] = json.loads((SCHEMAS / f"{name}.json").read_text())
    Draft202012Validator.check_schema(schema)
    problems = [
        f"{error.json_path}: {error.message}"
        for error in Draft202012Validator(schema).iter_errors(document)
    ]
    assert not problems, f"{name}: {problems}"


Command = Callable[..., Result]


def command_in(home: Path | str) -> Command:
    """Return a function that runs one command line in this process.

    With an HF_ variable it runs in a process of its own: huggingface_hub reads those on import.
    """

    def run(*arguments: str, stdin: str | None = None, **variables: str) -> Result:
        if any(name.startswith("HF_") for name in variables):
            done = warm.run(arguments, {**environment(home), **variables})
            return Result(done.returncode, done.stdout, done.stderr)
        with ExitStack() as stack:
            given, out, err = (stack.enter_context(_stream()) for _ in range(3))
            given.write(stdin or "")
            given.seek(0)
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            for name, value in {**environment(home), **variables}.items():
                patch.setenv(name, value)
            patch.setattr(sys, "stdin", given)
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            try:
                code = answer(arguments)
            except SystemExit as ended:  # completion
                code = int(ended.code or 0)
            return Result(code, _written(out), _written(err))

    return run


def _stream() -> IO[str]:
    """Open a temporary file, because commands check the file type of standard input."""
    return tempfile.TemporaryFile("w+", encoding="utf-8", newline="")


def _written(stream: IO[str]) -> str:
    stream.flush()
    stream.seek(0)
    return stream.read()


@pytest.fixture
def moeinf(demo_home: Path) -> Command:
    """Return the command in the shared home.

    Example: moeinf("run", "demo", "17+25=", stdin=None, MOEINF_DEBUG="1").
    """
    return command_in(demo_home)
