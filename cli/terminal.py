"""Ask what the stream of a console can do: is it a terminal, and how wide is it now."""

from __future__ import annotations

import os
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_FORCED = ("FORCE_COLOR", "TTY_COMPATIBLE")  # rich takes any stream for a terminal


def is_plain(stream: IO[str] | None) -> bool:
    """Return True for a file or a pipe that rich does not take for a terminal either."""
    try:
        return stream is None or not (stream.isatty() or any(map(os.environ.get, _FORCED)))
    except ValueError:  # it is closed
        return True


def is_terminal(console: Console) -> bool:
    """Return True for a terminal, also where FORCE_COLOR or TTY_COMPATIBLE deny it to rich."""
    try:
        return console.is_terminal or console.file.isatty()
    except (ValueError, AttributeError):  # it is closed, or missing
        return False


def columns(console: Console) -> int:
    """Return the current width of a terminal; 0 for anything else and for a dumb terminal."""
    if console.is_dumb_terminal:
        return 0
    try:
        return os.get_terminal_size(console.file.fileno()).columns
    except (OSError, ValueError, AttributeError):
        return 0
