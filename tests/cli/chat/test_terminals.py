"""Test the output to pipes, to terminals without colours, and to narrow terminals."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pexpect
import pytest

from tests.cli.conftest import COMMAND, environment
from tests.cli.screen import Screen, open_pty
from tests.cli.warm import Warm
from tests.cli.warm_terminal import spawn

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
CONTROL = re.compile(r"\x1b|\r")


def in_terminal(home: Path, columns: int, *arguments: str, **variables: str) -> tuple[int, str]:
    """Run a command in a pseudo-terminal; return its exit code and output."""
    plain = {k: v for k, v in environment(home).items() if k not in ("NO_COLOR", "COLUMNS")}
    given = {**plain, "TERM": "xterm", **variables}
    child = spawn(given, *arguments, rows=24, columns=columns)
    child.expect(pexpect.EOF)
    child.close()
    return int(child.exitstatus), str(child.before)


@pytest.mark.parametrize(
    "arguments", [["pull", "demo"], ["show", "nothing"], ["run", "demo", "17+25=", "--verbose"]]
)
def test_pipes_get_no_bars_and_no_colours(arguments: list[str], tmp_path: Path) -> None:
    variables = {k: v for k, v in environment(tmp_path).items() if k != "NO_COLOR"}
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as pipe:
        code = Warm(arguments, {**variables, "TERM": "xterm"}, None, None, pipe, pipe).wait()
    with os.fdopen(reading, encoding="utf-8", newline="") as pipe:
        shown = pipe.read()
    assert code == (1 if "nothing" in arguments else 0)
    assert not CONTROL.search(shown)
    assert "━" not in shown


def test_a_terminal_gets_bars_and_colours(tmp_path: Path) -> None:
    code, shown = in_terminal(tmp_path, 100, "pull", "demo")
    assert code == 0
    assert "━" in shown
    assert "MiB" in shown
    code, shown = in_terminal(tmp_path, 100, "show", "nothing")
    assert (code, "\x1b[31mError:" in shown) == (1, True)


def test_no_color(tmp_path: Path) -> None:
    code, shown = in_terminal(tmp_path, 100, "show", "nothing", NO_COLOR="1")
    assert code == 1
    assert "Error: there is no model 'nothing'" in shown
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", shown)


def test_a_terminal_that_can_do_nothing(tmp_path: Path) -> None:
    code, shown = in_terminal(tmp_path, 80, "pull", "demo", TERM="dumb")
    assert code == 0
    assert not COLOUR.search(shown)
    assert "demo:bf16: " in shown


@pytest.mark.parametrize("arguments", [["list"], ["show", "demo"], ["plan", "demo"], ["--help"]])
def test_a_narrow_terminal(arguments: list[str], demo_home: Path) -> None:
    code, shown = in_terminal(demo_home, 20, *arguments)
    assert code == 0
    assert "Traceback" not in shown
    whole = COLOUR.sub("", shown).replace("\r", "")
    for word in {"list": ["demo:bf16"], "show": ["olmoe"], "plan": ["tokens/s"]}.get(
        arguments[0], ["pull"]
    ):
        assert word in whole


@pytest.mark.parametrize(
    ("option", "shown"),
    [([], ["ant, fig, owl,", "zebra", ""]), (["--nowordwrap"], ["ant, fig, owl, z", "ebra", ""])],
    ids=["wrapped", "nowordwrap"],
)
def test_words_wrap_at_the_edge(option: list[str], shown: list[str], demo_home: Path) -> None:
    line = ["run", "demo", "sort owl, fig, zebra, ant", *option]
    with open_pty(16) as pty:
        given = {**environment(demo_home), "TERM": "xterm"}
        code = Warm(line, given, None, None, pty.stream, pty.stream).wait()
        assert code == 0
        assert Screen(16).feed(pty.rest()).lines == shown


def test_a_reader_that_leaves(demo_home: Path) -> None:
    line = '"$@" show demo | true; echo "code ${PIPESTATUS[0]}"'
    done = subprocess.run(
        ["bash", "-c", line, "bash", *COMMAND],
        env=environment(demo_home),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout in ("code 0\n", "code 1\n")
    assert done.stderr == ""
