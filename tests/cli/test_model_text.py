"""Test answers and thoughts on a pseudo-terminal: they share its cursor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest

from moeinf.cli.output import Output
from tests.cli.screen import Pty, Screen, open_pty

Begin = Callable[..., Output]
WORDS = "one two three four five six seven"
WRAPPED = ["one two three", "four five six", "seven"]


@pytest.fixture
def pty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pty]:
    """Yield a terminal of 16 columns."""
    for name, value in {"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "200"}.items():
        monkeypatch.setenv(name, value)
    with open_pty(16) as pty:
        yield pty


@pytest.fixture
def begin(pty: Pty, monkeypatch: pytest.MonkeyPatch) -> Begin:
    """Return a function that makes an output to the terminal, or with another stdout.

    The streams are replaced within the test: pytest sets them before each one.
    """

    def make(stdout: TextIO | None = None) -> Output:
        monkeypatch.setattr(sys, "stdout", stdout or pty.stream)
        monkeypatch.setattr(sys, "stderr", pty.stream)
        return Output()

    return make


def lines(pty: Pty, columns: int = 16) -> list[str]:
    pty.stream.flush()
    return Screen(columns).feed(pty.rest()).lines


def test_an_answer_is_wrapped_at_the_width_of_the_terminal(pty: Pty, begin: Begin) -> None:
    out = begin()
    for char in WORDS:
        out.text(char)
    out.end_answer()
    assert lines(pty) == [*WRAPPED, ""]


def test_a_terminal_that_is_resized_meanwhile(pty: Pty, begin: Begin) -> None:
    out = begin()
    out.text("one two three ")
    pty.resize(30)
    out.text("four five six seven eight")
    assert lines(pty, 30) == ["one two three four five six", "seven eight"]


def test_nowordwrap(pty: Pty, begin: Begin) -> None:
    out = begin()
    out.wordwrap = False
    out.text(WORDS)
    out.end_answer()
    assert lines(pty) == [WORDS[:16], WORDS[16:32], WORDS[32:], ""]


def test_thoughts_are_wrapped_and_an_empty_line_ends_them(pty: Pty, begin: Begin) -> None:
    out = begin()
    for word in WORDS.split():
        out.thinking(f"{word} ")
    out.text("the answer")
    out.thinking(" one two")
    out.text("so it is")
    out.end_answer()
    assert lines(pty) == [*WRAPPED, "", "the answer one", "two", "", "so it is", ""]


def test_thoughts_that_were_cut_off(pty: Pty, begin: Begin) -> None:
    out = begin()
    out.thinking("```\ncode")
    out.end_answer()
    out.text(WORDS)  # not in the code block of before
    assert lines(pty) == ["```", "code", "", *WRAPPED]


def test_an_error_in_an_answer_begins_a_line(pty: Pty, begin: Begin) -> None:
    out = begin()
    out.text("one")
    out.end_answer()
    out.end_answer()
    out.error("x", "broken")
    assert lines(pty) == ["one", "Error: broken", ""]


def test_control_characters_count_as_they_are_shown(pty: Pty, begin: Begin) -> None:
    begin().text("one two \x1b[2Jthree")
    assert lines(pty) == ["one two", r"\x1b[2Jthree"]


def test_an_answer_in_a_file_has_no_line_ends_of_ours(
    pty: Pty, begin: Begin, tmp_path: Path
) -> None:
    """Thoughts at the terminal do not move the file's cursor, nor does the file theirs."""
    with (tmp_path / "answer").open("w", encoding="utf-8") as file:
        out = begin(file)
        for word in ("one two three ", "four five"):
            out.thinking(word)
            out.text(f"{WORDS} \x1b")
        out.end_answer()
    assert (tmp_path / "answer").read_text() == f"{WORDS} \x1b" * 2 + "\n"
    assert lines(pty) == ["one two three", "", "four five", "", ""]
