"""Print results on stdout, and progress and diagnostics on stderr.

Nothing else prints, except the spinner that this file starts. Text comes from models, hubs, servers
and file names: its control characters are made visible, and it is never read as markup.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from rich.cells import cell_len

from moeinf.cli.spinner import Spinner
from moeinf.cli.terminal import columns, is_plain, is_terminal
from moeinf.cli.word_wrap import WordWrap
from moeinf.errors import Failure, problem
from moeinf.runtime.visible import json_visible, visible

if TYPE_CHECKING:  # into a pipe, `list` and `run --quiet` need only `cells` of rich
    from rich.console import Console
    from rich.text import Text

_NOTE_EVERY_S = 10.0
_GAPS = (4, 2, 1)  # spaces between the columns of a table, as the terminal affords
_LEAST_PROSE = 24  # columns; a narrower terminal breaks lines itself


class Advance(Protocol):
    """Advance a bar by a number of steps."""

    def __call__(self, steps: int = 1) -> None: ...


class OutputFailed(Failure, OSError):
    """Standard output cannot be written: the disk is full, or the device fails."""

    code = "output_failed"
    hint = "the same command after you free some disk space, or another output file"

    def __str__(self) -> str:
        return str(self.strerror)


class Output:
    """The output of a command: text for people, or one JSON document for scripts."""

    def __init__(self, json: bool = False, quiet: bool = False) -> None:
        self.json = json
        self.quiet = quiet
        self.wordwrap = True  # of model text, on terminals
        self._wrap, self._stderr_wrap = WordWrap(), WordWrap()
        self._thinking = False  # the last model text was its reasoning
        self._spinner = Spinner(None, "")  # the last one

    @cached_property
    def console(self) -> Console:
        return _console(stderr=False)

    @cached_property
    def err(self) -> Console:
        return _console(stderr=True)

    @property
    def _terminal(self) -> Console | None:
        """The console of stdout; None for a file or a pipe, where rich would add nothing."""
        return None if "console" not in vars(self) and is_plain(sys.stdout) else self.console

    @property
    def _bars(self) -> bool:
        """True where bars are drawn: on a terminal only, since a log would keep every state."""
        return self.err.is_terminal and not (self.quiet or self.json)

    def document(self, value: dict[str, Any]) -> None:
        """Print the one JSON document of a command."""
        _write(json_visible(json.dumps(value, ensure_ascii=False, indent=2)) + "\n")

    def text(self, text: str) -> None:
        """Print model text at once: unchanged to a file or a pipe.

        On a terminal it is made visible, and its words are wrapped.
        """
        if self._thinking:
            self._end_thinking()
        console = self._terminal
        shown = text if console is None or not is_terminal(console) else visible(text)
        _write(self._wrap.add(shown, self._columns(console)))

    def thinking(self, text: str) -> None:
        """Print a model's reasoning dimmed on stderr, so that stdout holds only the answer."""
        self._thinking = True
        wrapped = self._thinking_wrap.add(visible(text), self._columns(self.err))
        self.err.print(_styled(wrapped, "dim"), end="")

    def end_answer(self) -> None:
        """End the line of model text that has begun, also if it was cut off."""
        if self._thinking:
            self._end_thinking()
        elif self._wrap.column:
            self.text("\n")
        self._wrap.end_answer()

    def _end_thinking(self) -> None:
        """Leave a blank line after reasoning at a terminal."""
        self._thinking = False
        if is_terminal(self.err):
            wrap = self._thinking_wrap
            self.err.print("\n" if wrap.column else "")
            wrap.column = 0
            wrap.end_answer()

    @property
    def _thinking_wrap(self) -> WordWrap:
        """The cursor of stderr: the same as that of stdout if both are terminals."""
        both = is_terminal(self.console) and is_terminal(self.err)
        return self._wrap if both else self._stderr_wrap

    def _columns(self, console: Console | None) -> int:
        return columns(console) if self.wordwrap and console is not None else 0

    def spinner(self, text: str) -> Spinner:
        """Return a spinner to show on stderr while something runs: on terminals only."""
        plain = "err" not in vars(self) and is_plain(sys.stderr)
        drawn = not (plain or self.quiet or self.json) and columns(self.err)
        self._spinner = Spinner(self.err if drawn else None, text)
        return self._spinner

    def line(self, text: str = "") -> None:
        """Print a line of a result."""
        if (console := self._terminal) is None:
            _write(visible(text) + "\n")
            return
        with _writing():
            console.print(_styled(visible(text)))

    def done(self, text: str) -> None:
        """Print that a command has succeeded; --quiet leaves it out."""
        if not self.quiet:
            self.line(text)

    def note(self, text: str) -> None:
        """Print one line on stderr about a choice and its reason; --quiet leaves it out."""
        if not self.quiet:
            self._tell(text, "dim")

    def prose(self, text: str) -> None:
        """Print a sentence; a terminal narrower than it breaks it between words."""
        self.line(_broken(text, self._terminal))

    def explain(self, reading: str, legend: Sequence[tuple[str, str]] = ()) -> None:
        """Print a sentence that reads a table, and its columns' meaning; --quiet leaves it out."""
        if not self.quiet:
            self.line()
            self.prose(reading)
            self.fields(legend)

    def fields(self, pairs: Sequence[tuple[str, str]], to_stderr: bool = False) -> None:
        """Print aligned `label: value` lines; a narrow terminal breaks values between words."""
        width = max((len(label) for label, _ in pairs), default=0) + 2
        say, console = (self._tell, self.err) if to_stderr else (self.line, self._terminal)
        for label, value in pairs:
            say(f"{label + ':':<{width}}{_broken(value, console, width)}")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], keys: int = 1) -> None:
        """Print columns as Ollama does: no rules, a header in capitals.

        A table wider than the terminal gets smaller gaps. If it is still wider, it becomes several
        tables: each has the first `keys` columns and some of the others.
        """
        lines = [[visible(cell) for cell in line] for line in (columns, *rows)]
        widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
        gap, tables = _fitted(widths, keys, _width(self._terminal))
        for number, shown in enumerate(tables):
            if number:
                self.line()
            for line in lines:
                cells = (line[i] + " " * (widths[i] - cell_len(line[i]) + gap) for i in shown)
                self.line("".join(cells).rstrip())

    def error(self, code: str, message: str, hint: str = "") -> None:
        """Print an error and its hint; on stderr if stdout cannot be written."""
        if self.json:
            try:
                self.document({"error": {"code": code, "message": message, "hint": hint}})
                return
            except OutputFailed:
                hint = ""
        self._spinner.stop()
        text = _styled(f"Error: {visible(message)}")
        text.stylize("red", 0, len("Error:"))
        self.err.print(text)
        if hint:
            self._tell(f"Try: {hint}")

    def trace(self, error: BaseException) -> None:
        """Print the traceback of a bug on stderr."""
        self._tell("".join(traceback.format_exception(error)), end="")

    def _tell(self, text: str, style: str = "", end: str = "\n") -> None:
        self._spinner.stop()  # it has the line
        self.err.print(_styled(visible(text), style), end=end)

    @contextmanager
    def counting(self, what: str, total: int) -> Iterator[Advance]:
        """Show a bar with the time left; yield a function that advances it (default: by 1).

        Without bars, print a note with the same facts every _NOTE_EVERY_S seconds; --json leaves
        it out.
        """
        from rich import progress  # 10 ms that `list` and `ps` do not need

        bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(compact=True),
            console=self.err,
            disable=not self._bars,
        )
        with bar:
            task = bar.add_task(visible(what), total=total)
            done, begun = 0, time.monotonic()
            noted = begun

            def advance(steps: int = 1) -> None:
                nonlocal done, noted
                bar.advance(task, steps)
                done, now = done + steps, time.monotonic()
                if not (self._bars or self.json) and now - noted >= _NOTE_EVERY_S:
                    noted = now
                    left = (now - begun) / done * max(0, total - done)
                    self.note(f"{what}: {done} of {total}, about {left:.0f} s left")

            yield advance

    @contextmanager
    def progress(self, what: str) -> Iterator[Callable[[str, int, int], None]]:
        """Show bars with bytes, rate and time left; yield a function of (phase, done, total).

        A phase's bar appears with its first call, so that an earlier failure shows only its error.
        The bar of a single file disappears when the file is complete. Without bars, print a note
        per phase.
        """
        from rich import progress

        bars = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.DownloadColumn(binary_units=True),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(compact=True),
            console=self.err,
            disable=not self._bars,
        )
        phases: dict[str, progress.TaskID] = {}

        def update(phase: str, done: int, total: int) -> None:
            of_a_file = phase.endswith(".safetensors")
            if phase not in phases:
                if not (self._bars or self.json or of_a_file):
                    self.note(f"{phase} {what}")
                text = f"  {phase}" if of_a_file else f"{phase} {what}"
                phases[phase] = bars.add_task(visible(text), total=total)
                bars.start()
            ended = done >= total and of_a_file
            bars.update(phases[phase], completed=done, total=total, visible=not ended)

        try:
            yield update
        finally:
            if phases:
                bars.stop()


def _console(stderr: bool) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=True, emoji=False)


def _styled(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(text, style)


def _width(console: Console | None) -> float:
    """Return the columns of a terminal; a file or a pipe has no limit."""
    return console.width if console is not None and console.is_terminal else float("inf")


def _broken(text: str, console: Console | None, indent: int = 0) -> str:
    """Break a line between words where the terminal ends; indent all but the first line."""
    text, width = visible(text), _width(console) - indent
    if not _LEAST_PROSE <= width < cell_len(text) or "\n" in text:
        return text
    lines = textwrap.wrap(text, int(width), break_long_words=False, break_on_hyphens=False)
    return ("\n" + " " * indent).join(lines)


def _fitted(widths: Sequence[int], keys: int, width: float) -> tuple[int, list[list[int]]]:
    """Choose the gap, and the columns of each table; all tables have the first `keys` columns."""
    every = list(range(len(widths)))
    for gap in _GAPS:
        if sum(widths) + gap * (len(widths) - 1) <= width:
            return gap, [every]
    gap, first = _GAPS[1], every[:keys]
    tables = [first.copy()]
    for column in every[keys:]:
        taken = sum(widths[i] + gap for i in tables[-1])
        if taken + widths[column] > width and len(tables[-1]) > keys:
            tables.append(first.copy())
        tables[-1].append(column)
    return gap, tables


def draw(text: str) -> None:
    """Write text with control sequences of our own to a terminal. Raises OutputFailed."""
    _write(text)


def flush() -> None:
    """Write what standard output still holds. Raises OutputFailed."""
    with _writing():
        if sys.stdout is not None:  # the parent process may have closed it
            sys.stdout.flush()


def _write(text: str) -> None:
    with _writing():
        if sys.stdout is not None:
            sys.stdout.write(text)
            sys.stdout.flush()


@contextmanager
def _writing() -> Iterator[None]:
    """Turn errors of standard output into OutputFailed; keep BrokenPipeError as it is."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_output()
        words = f"standard output cannot be written: {problem(error)}"
        raise OutputFailed(error.errno or errno.EIO, words) from error


def _drop_output() -> None:
    """Redirect buffered output to /dev/null, so that the end of the process does not fail."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
