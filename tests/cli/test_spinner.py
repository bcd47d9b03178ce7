"""Test the spinner on a pseudo-terminal, and its absence elsewhere."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from moeinf.cli.output import Output
from moeinf.cli.spinner import FRAME_S
from tests.cli.screen import Pty, Screen, open_pty


@pytest.fixture(params=["utf-8"])
def pty(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pty]:
    monkeypatch.setenv("TERM", "xterm")
    with open_pty(40, request.param) as pty:
        yield pty


def output(pty: Pty, **options: bool) -> Output:
    out = Output(**options)
    out.err = Console(file=pty.stream)
    return out


def test_it_turns_changes_its_text_and_leaves_no_trace(pty: Pty) -> None:
    with output(pty).spinner("loading demo:bf16") as spinner:
        pty.wait_for("⠋ loading demo:bf16")
        pty.wait_for("⠙ loading demo:bf16")
        spinner.show("reading the prompt 1,204/3,500 tokens")
        pty.wait_for("reading the prompt 1,204/3,500 tokens")
    assert Screen(40).feed(pty.rest()).lines == [""]
    spinner.stop()  # a second time
    assert pty.rest().endswith("\r\x1b[K")


def test_a_line_that_is_longer_than_the_terminal_is_cut(pty: Pty) -> None:
    with output(pty).spinner("日本" * 40):
        pty.wait_for("\x1b[K⠙")
    screen = Screen(40).feed(pty.rest())
    assert (screen.lines, screen.continued) == ([""], set())


@pytest.mark.parametrize("pty", ["latin-1"], indirect=True)
def test_a_terminal_without_unicode_gets_plain_frames(pty: Pty) -> None:
    with output(pty).spinner("loading"):
        pty.wait_for("| loading")
        pty.wait_for("/ loading")


def test_control_characters_of_a_name_are_shown(pty: Pty) -> None:
    with output(pty).spinner("loading \x1b]0;x\x07\n"):
        pty.wait_for(r"loading \x1b]0;x\x07")
    assert "\x1b]" not in pty.rest()


def test_a_note_ends_it(pty: Pty) -> None:
    out = output(pty)
    with out.spinner("loading"):
        pty.wait_for("loading")
        out.note("a note")
        pty.wait_for("a note")
    assert Screen(40).feed(pty.rest()).lines == ["a note", ""]


def test_short_work_shows_nothing(pty: Pty) -> None:
    assert FRAME_S >= 0.05
    with output(pty).spinner("loading"):
        pass
    assert pty.rest() == ""


@pytest.mark.parametrize(
    ("options", "variables"),
    [({"quiet": True}, {}), ({"json": True}, {}), ({}, {"TERM": "dumb"})],
    ids=["quiet", "json", "dumb"],
)
def test_quiet_json_and_dumb_terminals_have_none(
    options: dict[str, bool],
    variables: dict[str, str],
    pty: Pty,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert output(pty, **options).spinner("loading")._console is None


def test_a_file_has_none() -> None:
    out = Output()
    out.err = Console(file=io.StringIO(), force_terminal=True)  # as FORCE_COLOR=1 does
    assert out.spinner("loading")._console is None
