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
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table


class Output:
    """Where a command's words go: as text for people, as one JSON document for scripts."""

    def __init__(self, json: bool = False, quiet: bool = False) -> None:
        self.json = json
        self.quiet = quiet
        self.err = Console(stderr=True, highlight=False, soft_wrap=True)
        self.console = Console(highlight=False, soft_wrap=True)

    def document(self, value: dict[str, Any]) -> None:
        """The one JSON document of a command."""
        sys.stdout.write(json.dumps(value, ensure_ascii=False, indent=2) + "\n")
        sys.stdout.flush()

    def text(self, text: str) -> None:
        """Model text, as it is: no markup, no wrapping, at once."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def line(self, text: str = "") -> None:
        """A line of a result."""
        self.console.print(escape(text))

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
        table = Table(box=None, pad_edge=False, padding=(0, 4, 0, 0), header_style="")
        for column in columns:
            table.add_column(column, no_wrap=True)
        for row in rows:
            table.add_row(*(escape(cell) for cell in row))
        self.console.print(table)

    def error(self, code: str, message: str, hint: str = "") -> None:
        """What happened, and what to type next."""
        if self.json:
            self.document({"error": {"code": code, "message": message, "hint": hint}})
            return
        self.err.print(f"[red]Error:[/red] {escape(message)}")
        if hint:
            self.err.print(escape(hint))

    @contextmanager
    def progress(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """A bar with bytes, rate and time left; call what it gives with (done, total).

        The bar appears with the first call: what fails before shows its error alone.
        """
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(compact=True),
            console=self.err,
            disable=self.quiet or self.json,
        )
        task = bar.add_task(escape(what), total=None)

        def update(done: int, total: int) -> None:
            bar.start()
            bar.update(task, completed=done, total=total)

        try:
            yield update
        finally:
            if bar.live.is_started:
                bar.stop()
