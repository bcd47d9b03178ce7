"""Test that output cannot control a terminal, and that a failed write is an error."""

from __future__ import annotations

import io
import json
import logging
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from moeinf.cli.errors import tell
from moeinf.cli.output import Output
from moeinf.runtime.hub.listing import RepositoryError
from moeinf.runtime.visible import visible
from moeinf.server.http.log_lines import VisibleFormatter
from tests.cli.conftest import COMMAND, environment

HOSTILE = "a\x1b]0;title\x07b\x1b[2J\x9b31m\u202ec\r[bold]d[/bold] \\"
SHOWN = visible(HOSTILE)


@pytest.mark.parametrize(
    "say",
    [
        lambda out: out.line(HOSTILE),
        lambda out: out.done(HOSTILE),
        lambda out: out.note(HOSTILE),
        lambda out: out.thinking(HOSTILE),
        lambda out: out.fields([(HOSTILE, HOSTILE)]),
        lambda out: out.fields([(HOSTILE, HOSTILE)], to_stderr=True),
        lambda out: out.table([HOSTILE], [[HOSTILE]]),
        lambda out: out.error("hub", HOSTILE, HOSTILE),
        lambda out: out.trace(RuntimeError(HOSTILE)),
        lambda out: tell(out, RepositoryError(HOSTILE)),
        lambda out: tell(out, OSError(5, HOSTILE, HOSTILE)),
        lambda out: out.document({HOSTILE: HOSTILE}),
    ],
    ids=(
        "line done note thinking fields fields-stderr table error trace hub os-error document"
    ).split(),
)
def test_control_characters_are_shown_and_markup_is_text(
    say: Callable[[Output], None], capsys: pytest.CaptureFixture[str]
) -> None:
    say(Output())
    said = capsys.readouterr()
    whole = said.out + said.err
    assert visible(whole) == whole
    assert "[bold]d[/bold] \\" in whole


def test_model_text_is_made_visible_for_terminals_only(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output()
    out.text(HOSTILE)
    assert capsys.readouterr().out == HOSTILE
    out.console = Console(file=io.StringIO(), force_terminal=True)
    out.text(HOSTILE)
    assert capsys.readouterr().out == SHOWN


@pytest.mark.parametrize("what", ["counting", "progress"])
def test_bars_show_names_as_they_are(what: str) -> None:
    out, stream = Output(), io.StringIO()
    out.err = Console(file=stream, force_terminal=True, width=200)
    if what == "counting":
        with out.counting(HOSTILE, 1) as step:
            step()
    else:
        with out.progress(HOSTILE) as update:
            update("repacking", 1, 1)
    assert "[bold]d[/bold]" in stream.getvalue()
    assert "\x1b]0;" not in stream.getvalue()
    assert "\x07" not in stream.getvalue()


def test_progress_is_noted_where_there_are_no_bars(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 4.0, 12.0, 13.0])  # at the start, and after each step
    monkeypatch.setattr("moeinf.cli.output.time.monotonic", lambda: next(clock))
    with Output().counting("passes", 4) as step:
        for _ in range(3):
            step()
    assert capsys.readouterr().err == "passes: 2 of 4, about 12 s left\n"


def test_progress_of_many_steps_is_noted_but_not_beside_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for as_json, words in ((False, "passes: 64 of 256, about 36 s left\n"), (True, "")):
        clock = iter([0.0, 12.0])
        monkeypatch.setattr("moeinf.cli.output.time.monotonic", lambda c=clock: next(c))
        with Output(json=as_json).counting("passes", 256) as step:
            step(64)
        assert capsys.readouterr().err == words


def _shown(width: int | None, say: Callable[[Output], None]) -> list[str]:
    """Return the lines on a terminal of that width, or in a pipe."""
    out, stream = Output(), io.StringIO()
    out.console = Console(
        file=stream, force_terminal=width is not None, width=width or 20, soft_wrap=True
    )
    say(out)
    return stream.getvalue().splitlines()


def _table(out: Output) -> None:
    out.table(["NAME", "SIZE", "AGO"], [["a", "1 MiB", "1 day"], ["日本", "22", "3"]], keys=1)


def test_a_table_fits_the_terminal() -> None:
    wide = ["NAME    SIZE     AGO", "a       1 MiB    1 day", "日本    22       3"]
    assert _shown(None, _table) == _shown(22, _table) == wide
    assert _shown(21, _table) == ["NAME  SIZE   AGO", "a     1 MiB  1 day", "日本  22     3"]
    assert _shown(17, _table) == ["NAME SIZE  AGO", "a    1 MiB 1 day", "日本 22    3"]
    split = ["NAME  SIZE", "a     1 MiB", "日本  22", "", "NAME  AGO", "a     1 day", "日本  3"]
    assert _shown(15, _table) == _shown(3, _table) == split


def test_sentences_are_broken_between_words_on_a_terminal() -> None:
    text = "adaptive saves 62% of the reads of lru"
    assert _shown(30, lambda out: out.prose(text)) == ["adaptive saves 62% of the", "reads of lru"]
    assert _shown(None, lambda out: out.prose(text)) == [text]
    assert _shown(8, lambda out: out.prose(text)) == [text]  # too narrow to help
    fields = _shown(36, lambda out: out.fields([("a label", text), ("b", "c")]))
    assert fields == ["a label: adaptive saves 62% of the", "         reads of lru", "b:       c"]


def test_quiet_leaves_out_readings_and_legends(capsys: pytest.CaptureFixture[str]) -> None:
    Output(quiet=True).explain("A sentence.", [("HIT", "words")])
    assert capsys.readouterr().out == ""
    Output().explain("A sentence.", [("HIT", "words")])
    assert capsys.readouterr().out == "\nA sentence.\nHIT: words\n"


def test_log_lines_of_the_server() -> None:
    record = logging.LogRecord("uvicorn.error", logging.ERROR, "x", 1, HOSTILE, (), None)
    line = VisibleFormatter("%(message)s", use_colors=False).format(record)
    assert line == SHOWN


@pytest.mark.linux("writes to /dev/full")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["list", "--json"], "standard output cannot be written: the disk is full"),
        (["list"], "standard output cannot be written: the disk is full"),
        (["--version"], "standard output cannot be written: the disk is full"),
        (["show", "nothing", "--json"], "there is no model 'nothing' on this machine"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_full_disk(arguments: list[str], words: str, demo_home: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, *arguments],
            env=environment(demo_home),
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, f"Error: {words}\n")


def test_a_document_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    Output(json=True).document({"name": HOSTILE})
    assert json.loads(capsys.readouterr().out) == {"name": HOSTILE}
