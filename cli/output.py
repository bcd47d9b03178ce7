"""Print results on stdout, and progress and diagnostics on stderr.

This is the only file that prints. Text comes from models, hubs, servers and file names: its control
characters are made visible, and it is never read as markup.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from moeinf.errors import Failure
from moeinf.runtime.visible import json_visible, visible

_NOTE_EVERY_S = 10.0


class Advance(Protocol):
    """Advance a bar by a number of steps."""

    def __call__(self, steps: int = 1) -> None: ...


class OutputFailed(Failure, OSError):
    """Standard output cannot be written: its disk is full, or its device fails."""

    code = "output_failed"
    hint = "the same command after you free some disk space, or another output file"

    def __str__(self) -> str:
        return str(self.strerror)


class Output:
    """The output of a command: text for people, or one JSON document for scripts."""

    def __init__(self, json: bool = False, quiet: bool = False) -> None:
        self.json = json
        self.quiet = quiet
        self.err = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
        self.console = Console(highlight=False, soft_wrap=True, emoji=False)

    @property
    def _bars(self) -> bool:
        """True where bars are drawn: on a terminal only, since a log would keep every state."""
        return self.err.is_terminal and not (self.quiet or self.json)

    def document(self, value: dict[str, Any]) -> None:
        """Print the one JSON document of a command."""
        _write(json_visible(json.dumps(value, ensure_ascii=False, indent=2)) + "\n")

    def text(self, text: str) -> None:
        """Print model text at once: unchanged to a file or a pipe, made visible on a terminal."""
        _write(visible(text) if self.console.is_terminal else text)

    def thinking(self, text: str) -> None:
        """Print a model's reasoning dimmed on stderr, so that stdout holds only the answer."""
        self._tell(text, "dim", end="")

    def line(self, text: str = "") -> None:
        """Print a line of a result."""
        with _writing():
            self.console.print(Text(visible(text)))

    def done(self, text: str) -> None:
        """Print that a command has succeeded; --quiet leaves it out."""
        if not self.quiet:
            self.line(text)

    def note(self, text: str) -> None:
        """Print one line on stderr about a choice and its reason; --quiet leaves it out."""
        if not self.quiet:
            self._tell(text, "dim")

    def fields(self, pairs: Sequence[tuple[str, str]], to_stderr: bool = False) -> None:
        """Print aligned `label: value` lines."""
        width = max((len(label) for label, _ in pairs), default=0) + 2
        say = self._tell if to_stderr else self.line
        for label, value in pairs:
            say(f"{label + ':':<{width}}{value}")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print columns as Ollama does: no rules, a header in capitals."""
        lines = [list(columns), *(list(row) for row in rows)]
        widths = [max(len(line[i]) for line in lines) + 4 for i in range(len(columns))]
        for line in lines:
            cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            self.line("".join(cells).rstrip())

    def error(self, code: str, message: str, hint: str = "") -> None:
        """Print an error and its hint; on stderr if stdout cannot be written."""
        if self.json:
            try:
                self.document({"error": {"code": code, "message": message, "hint": hint}})
                return
            except OutputFailed:
                hint = ""
        self.err.print(Text.assemble(("Error:", "red"), " ", visible(message)))
        if hint:
            self._tell(f"Try: {hint}")

    def trace(self, error: BaseException) -> None:
        """Print the traceback of a bug on stderr."""
        self._tell("".join(traceback.format_exception(error)), end="")

    def _tell(self, text: str, style: str = "", end: str = "\n") -> None:
        self.err.print(Text(visible(text), style), end=end)

    @contextmanager
    def counting(self, what: str, total: int) -> Iterator[Advance]:
        """Show a bar with the time left; yield a function that advances it (default: by 1).

        Without bars, print a note with the same facts every _NOTE_EVERY_S seconds; --json leaves
        it out.
        """
        bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
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
        bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(compact=True),
            console=self.err,
            disable=not self._bars,
        )
        phases: dict[str, TaskID] = {}

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
        words = f"standard output cannot be written: {error.strerror or error}"
        raise OutputFailed(error.errno or errno.EIO, words) from error


def _drop_output() -> None:
    """Redirect buffered output to /dev/null, so that the end of the process does not fail."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
