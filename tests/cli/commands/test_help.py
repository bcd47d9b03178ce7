"""Test `moeinf help`, `moeinf` alone, and the hints of wrong command lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.conftest import Command


def test_without_a_command_the_help_is_printed(moeinf: Command) -> None:
    alone = moeinf()
    assert (alone.code, alone.err) == (0, "")
    assert alone.out == moeinf("--help").out == moeinf("help").out


@pytest.mark.parametrize("command", [["run"], ["eamc"], ["eamc", "show"]])
def test_help_of_a_command(command: list[str], moeinf: Command) -> None:
    shown = moeinf("help", *command)
    assert shown.code == 0
    assert shown.out == moeinf(*command, "--help").out


def test_the_help_of_serve_names_every_variable(moeinf: Command) -> None:
    """They are the names in the one file that reads them, but for the one that only `run` reads."""
    source = (Path(__file__).parents[3] / "runtime/config.py").read_text(encoding="utf-8")
    read = set(re.findall(r'"(MOEINF_[A-Z_]+)"', source))
    shown = moeinf("serve", "--help").out
    told = read - {"MOEINF_NO_SERVER"}
    assert set(re.findall(r"^ +(MOEINF_[A-Z_]+)  ", shown, re.MULTILINE)) == told
    assert len(read) > 8
    page = (Path(__file__).parents[3] / "docs/cli.md").read_text(encoding="utf-8")
    assert "`MOEINF_NO_SERVER`" in page
    for name in (*told, "HF_TOKEN", "HF_ENDPOINT", "HF_HOME", "HF_HUB_OFFLINE"):
        assert name in shown
        assert f"`{name}`" in page


def test_help_of_an_unknown_command(moeinf: Command) -> None:
    result = moeinf("help", "nope")
    assert result.code == 2
    assert "there is no command 'nope'" in result.err


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("run demo --bogus", "moeinf run --help"),
        ("show", "moeinf show --help"),
        ("eamc bogus", "moeinf eamc --help"),
        ("bogus", "moeinf --help"),
    ],
)
def test_the_hint_names_the_commands_help(line: str, hint: str, moeinf: Command) -> None:
    result = moeinf(*line.split())
    assert result.code == 2
    assert result.err.splitlines()[-1] == f"Try: `{hint}`"


def test_the_words_of_a_prompt_are_joined(moeinf: Command) -> None:
    assert moeinf("run", "demo", "reverse", "planet").out == "tenalp\n"
