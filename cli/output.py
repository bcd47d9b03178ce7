"""Everything that is printed: results on stdout; progress and diagnostics on stderr.

Does not know what commands do. The only file that prints.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
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
        """The one JSON document of a command."""
        self.text(json.dumps(value, ensure_ascii=False, indent=2) + "\n")

    def text(self, text: str) -> None:
        """Model text, as it is: no markup, no wrapping, at once."""
        if sys.stdout is not None:  # it may have been closed by whoever started us
            sys.stdout.write(text)
            sys.stdout.flush()

    def thinking(self, text: str) -> None:
        """What a model only thinks: dimmed, on stderr, so that stdout holds the answer alone."""
        self.err.print(f"[dim]{escape(text)}[/dim]", end="")

    def line(self, text: str = "") -> None:
        """A line of a result."""
        self.console.print(escape(text))

    def done(self, text: str) -> None:
        """That a command has done what it was told to; --quiet leaves it out."""
        if not self.quiet:
            self.line(text)

    def note(self, text: str) -> None:
        """One line on what was chosen and why; --quiet leaves it out."""
        if not self.quiet:
            self.err.print(f"[dim]{escape(text)}[/dim]")

    def fields(self, pairs: Sequence[tuple[str, str]], to_stderr: bool = False) -> None:
        """Aligned `label: value` lines."""
        width = max((len(label) for label, _ in pairs), default=0) + 2
        console = self.err if to_stderr else self.console
        for label, value in pairs:
            console.print(escape(f"{label + ':':<{width}}{value}"))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Columns as Ollama prints them: no lines, capitals on top."""
        lines = [list(columns), *(list(row) for row in rows)]
        widths = [max(len(line[i]) for line in lines) + 4 for i in range(len(columns))]
        for line in lines:
            cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            self.line("".join(cells).rstrip())

    def error(self, code: str, message: str, hint: str = "") -> None:
        """What happened, and what to type next."""
        if self.json:
            self.document({"error": {"code": code, "message": message, "hint": hint}})
            return
        self.err.print(f"[red]Error:[/red] {escape(message)}")
        if hint:
            self.err.print(escape(hint))

    @contextmanager
    def counting(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        """A bar that goes one step per call, with the time that is left."""
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            console=self.err,
            disable=not self._bars,
        )
        with bar:
            task = bar.add_task(escape(what), total=total)
            yield lambda: bar.advance(task)

    @contextmanager
    def progress(self, what: str) -> Iterator[Callable[[str, int, int], None]]:
        """Bars with bytes, rate and time left; call what it gives with (phase, done, total).

        A phase's bar appears with its first call: what fails before shows its error alone. That of
        a single file goes when the file is there. Where there are no bars, phases are notes.
        """
        bars = Progress(
            TextColumn("{task.description}"),
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
                phases[phase] = bars.add_task(escape(text), total=total)
                bars.start()
            ended = done >= total and of_a_file
            bars.update(phases[phase], completed=done, total=total, visible=not ended)

        try:
            yield update
        finally:
            if phases:
                bars.stop()
