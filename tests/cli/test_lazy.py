"""Test that a command imports no other command, and that the help imports none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moeinf.cli.main import COMMANDS, command_line
from tests.cli.conftest import environment

_SHOW = """
import sys, json, atexit
from moeinf.cli.main import answer
answer({line!r})
print(json.dumps(sorted(name for name in sys.modules if name.startswith("moeinf.cli.commands."))))
"""
_ROOMS = {"moeinf.cli.commands.measuring", "moeinf.cli.commands.models"}


@pytest.mark.parametrize(
    ("line", "module"),
    [(["--help"], None), (["list"], "models.list_models"), (["lisst"], None)],
)
def test_what_is_imported(line: list[str], module: str | None, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SHOW.format(line=line)],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    found = set(json.loads(done.stdout.splitlines()[-1])) - _ROOMS
    assert found == ({f"moeinf.cli.commands.{module}"} if module else set())


@pytest.mark.parametrize("name", COMMANDS)
def test_each_is_where_the_table_says(name: str) -> None:
    found = command_line().commands[name]
    assert (found.name, found.hidden) == (name, COMMANDS[name].hidden)
    assert found.help
    assert len(COMMANDS[name].summary) <= 80 - 13  # a line of the help, not cut
