"""Everything that is printed: results on stdout; progress and diagnostics on stderr.

Does not know what commands do. The only file that prints. Text comes from models, hubs, servers and
file names: its control characters are made visible, and it is never read as markup.
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
    """Tell a bar that so many steps are done."""

    def __call__(self, steps: int = 1) -> None: ...


class OutputFailed(Failure, OSError):
    """Standard output cannot be written: its disk is full, or its device fails."""

    code = "output_failed"
    hint = "the same again after you free some space, or another place to write to"

    def __str__(self) -> str:
        return str(self.strerror)


class Output:
    """Where a command's words go: as text for people, as one JSON document for scripts."""

    def __init__(self, json: bool = False, quiet: bool = False) -> None:
        self.json = json
        self.quiet = quiet
        self.err = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
        self.console = Console(highlight=False, soft_wrap=True, emoji=False)

    @property
    def _bars(self) -> bool:
        """Bars are for people who look at a terminal; a log would keep their remains."""
        return self.err.is_terminal and not (self.quiet or self.json)

    def document(self, value: dict[str, Any]) -> None:
        """Print the one JSON document of a command."""
        _write(json_visible(json.dumps(value, ensure_ascii=False, indent=2)) + "\n")

    def text(self, text: str) -> None:
        """Print model text at once: as it is to a file or a pipe, visible to a terminal."""
        _write(visible(text) if self.console.is_terminal else text)

    def thinking(self, text: str) -> None:
        """What a model only thinks: dimmed, on stderr, so that stdout holds the answer alone."""
        self._tell(text, "dim", end="")

    def line(self, text: str = "") -> None:
        """A line of a result."""
        with _writing():
            self.console.print(Text(visible(text)))

    def done(self, text: str) -> None:
        """That a command has done what it was told to; --quiet leaves it out."""
        if not self.quiet:
            self.line(text)

    def note(self, text: str) -> None:
        """One line on what was chosen and why; --quiet leaves it out."""
        if not self.quiet:
            self._tell(text, "dim")

    def fields(self, pairs: Sequence[tuple[str, str]], to_stderr: bool = False) -> None:
        """Aligned `label: value` lines."""
        width = max((len(label) for label, _ in pairs), default=0) + 2
        say = self._tell if to_stderr else self.line
        for label, value in pairs:
            say(f"{label + ':':<{width}}{value}")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Columns as Ollama prints them: no lines, capitals on top."""
        lines = [list(columns), *(list(row) for row in rows)]
        widths = [max(len(line[i]) for line in lines) + 4 for i in range(len(columns))]
        for line in lines:
            cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            self.line("".join(cells).rstrip())

    def error(self, code: str, message: str, hint: str = "") -> None:
        """Print what happened and what to type next; on stderr where stdout cannot be written."""
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
        """Print where a bug happened, on stderr."""
        self._tell("".join(traceback.format_exception(error)), end="")

    def _tell(self, text: str, style: str = "", end: str = "\n") -> None:
        self.err.print(Text(visible(text), style), end=end)

    @contextmanager
    def counting(self, what: str, total: int) -> Iterator[Advance]:
        """A bar that goes `steps` per call (default: 1), with the time that is left.

        Where there are no bars, a note every _NOTE_EVERY_S says both; --json leaves it out.
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
        """Bars with bytes, rate and time left; call what it gives with (phase, done, total).

        A phase's bar appears with its first call: what fails before shows its error alone. That of
        a single file goes when the file is there. Where there are no bars, phases are notes.
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
        if sys.stdout is not None:  # it may have been closed by the process that started us
            sys.stdout.flush()


def _write(text: str) -> None:
    with _writing():
        if sys.stdout is not None:
            sys.stdout.write(text)
            sys.stdout.flush()


@contextmanager
def _writing() -> Iterator[None]:
    """Within, what standard output fails with is OutputFailed; a reader that left stays EPIPE."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_output()
        words = f"standard output cannot be written: {error.strerror or error}"
        raise OutputFailed(error.errno or errno.EIO, words) from error


def _drop_output() -> None:
    """Send what is still buffered nowhere, so that the end of the process does not fail again."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
