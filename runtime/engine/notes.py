"""Collect lines for the user: failures and costs that do not stop the engine."""

from __future__ import annotations


class Notes:
    """A queue of lines."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._once: set[str] = set()

    def append(self, line: str) -> None:
        self._lines.append(line)

    def append_once(self, line: str | None) -> None:
        """Append a line unless it was appended here before. None is ignored."""
        if line is not None and line not in self._once:
            self._once.add(line)
            self._lines.append(line)

    def take(self) -> list[str]:
        """Return the lines since the last call."""
        taken, self._lines = self._lines, []
        return taken
