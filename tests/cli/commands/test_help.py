"""Test `moeinf help`, `moeinf` alone, and the hints of wrong command lines."""

from __future__ import annotations

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
