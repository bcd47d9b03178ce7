"""Test that a command imports no other command, and that the help imports none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from moeinf.cli.main import COMMANDS, command_line
from tests.cli.conftest import environment

_SHOW = """
import sys, json, atexit
from moeinf.cli.main import answer
answer({line!r})
print(json.dumps(sorted(sys.modules)))
"""
_COMMANDS = "moeinf.cli.commands."
# Each takes 3 % to 90 % of the time of `list`.
_HEAVY = (
    "asyncio", "hmac", "http", "httpx", "huggingface_hub", "jinja2", "numpy", "pydantic",
    "torch", "yaml",
)  # fmt: skip
_RICH = ("rich.console", "rich.text")  # for terminals, and for errors
_ROOMS = {"moeinf.cli.commands.measuring", "moeinf.cli.commands.models"}


@pytest.mark.parametrize(
    ("line", "modules"),
    [
        (["--help"], {}),
        (["--version"], {}),
        (["list"], {"models.list_models"}),
        (["ps"], {"models.list_models", "ps"}),
        (["lisst"], {}),
    ],
)
def test_what_is_imported(line: list[str], modules: Iterable[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SHOW.format(line=line)],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    found = set(json.loads(done.stdout.splitlines()[-1]))
    ours = {name for name in found if name.startswith(_COMMANDS)}
    assert ours - _ROOMS == {_COMMANDS + module for module in modules}
    assert found.intersection(_HEAVY if done.stderr else _HEAVY + _RICH) == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_each_is_where_the_table_says(name: str) -> None:
    found = command_line().commands[name]
    assert (found.name, found.hidden) == (name, COMMANDS[name].hidden)
    assert found.help
    assert len(COMMANDS[name].summary) <= 80 - 13  # a line of the help, not cut


_WRITE = """
import sys
from moeinf.cli.output import Output
out = Output(quiet=True)
with out.spinner("loading"):
    out.note("left out")
out.text("a model's text")
out.end_answer()
print(sorted(name for name in sys.modules if name.startswith("rich.console")))
"""


def test_text_into_a_pipe_needs_no_rich(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WRITE],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("a model's text\n[]\n", "")
