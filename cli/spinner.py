"""Show on a terminal that the program works: a turning mark and a text, which leave no trace."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from rich.cells import set_cell_size

from moeinf.cli.terminal import columns
from moeinf.runtime.visible import visible

if TYPE_CHECKING:
    from rich.console import Console

FRAME_S = 0.1  # also the delay before the first frame: short work shows nothing
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_PLAIN_FRAMES = "|/-\\"  # for a terminal without Unicode
_ERASE = "\r\x1b[K"


class Spinner:
    """A spinner on the line of the cursor, which must be empty. Draws in a thread of its own.

    console: the terminal; None: draw nothing.
    """

    def __init__(self, console: Console | None, text: str) -> None:
        self._console = console
        self._text = text
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def show(self, text: str) -> None:
        """Change the text beside the spinner."""
        self._text = text

    def stop(self) -> None:
        """Erase the spinner. Further calls change nothing."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Spinner:
        if self._console is not None:
            self._thread = threading.Thread(target=self._draw, args=(self._console,), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _draw(self, console: Console) -> None:
        terminal, at = console.file, 0
        encoding = getattr(terminal, "encoding", None) or ""
        frames = _FRAMES if encoding.lower().startswith("utf") else _PLAIN_FRAMES
        with suppress(OSError, ValueError):  # the terminal is gone: the work goes on
            while not self._ended.wait(FRAME_S):
                line = f"{frames[at % len(frames)]} {visible(self._text)}".replace("\n", " ")
                most = max(1, columns(console) - 1)  # a line that wraps could not be erased
                terminal.write(_ERASE + set_cell_size(line, most).rstrip())
                terminal.flush()
                at += 1
            if at:
                terminal.write(_ERASE)
                terminal.flush()
