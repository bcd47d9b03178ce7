"""Show the lines that a user sees: a small terminal, and a pseudo-terminal for a program."""

from __future__ import annotations

import os
import re
import select
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

import pytest
from rich.cells import get_character_cell_size

termios = pytest.importorskip("termios", reason="needs pseudo-terminals, which Windows lacks")

_PARTS = re.compile(r"\x1b\[([0-9;?]*)([a-zA-Z])|(.)", re.DOTALL)


class Screen:
    """The rows of a terminal that wraps at `columns`; rows are as long as their text.

    It knows the control sequences that move the cursor or erase; it ignores others.
    """

    def __init__(self, columns: int = 80) -> None:
        self._columns = columns
        self._rows: list[list[str]] = [[]]  # one entry per cell; a wide character has "" behind it
        self._row = self._column = 0
        self.continued: set[int] = set()  # rows that the terminal has begun, without a line end

    @property
    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self._rows]

    def feed(self, text: str) -> Screen:
        for numbers, final, char in _PARTS.findall(text):
            if final:
                self._control(numbers, final)
            elif char == "\n":  # a terminal driver adds the return
                self._next_row()
            elif char == "\r":
                self._column = 0
            elif char == "\b":
                self._column = max(0, self._column - 1)
            elif char == "\t":
                self._column = min(self._column // 8 * 8 + 8, self._columns - 1)
            else:
                assert char.isprintable(), f"the terminal received {char!r}"
                self._show(char)
        return self

    def _control(self, numbers: str, final: str) -> None:
        count = int(numbers) if numbers.isdecimal() else 0
        row = self._rows[self._row]
        if final == "D":
            self._column = max(0, self._column - max(1, count))
        elif final == "C":
            self._column = min(self._columns - 1, self._column + max(1, count))
        elif final == "A":
            self._row = max(0, self._row - max(1, count))
        elif final == "K" and count == 0:
            del row[self._column :]
        elif final == "K":
            row.clear()
        elif final == "J" and count == 0:
            del row[self._column :]
            del self._rows[self._row + 1 :]

    def _next_row(self) -> None:
        self._row, self._column = self._row + 1, 0
        if self._row == len(self._rows):
            self._rows.append([])

    def _show(self, char: str) -> None:
        width = get_character_cell_size(char)
        if width == 0:
            self._rows[self._row][self._column - 1] += char
            return
        if self._column + width > self._columns:
            self._next_row()
            self.continued.add(self._row)
        row = self._rows[self._row]
        row += [" "] * (self._column + width - len(row))
        row[self._column] = char
        if width > 1:
            row[self._column + 1] = ""
        self._column += width


@dataclass
class Pty:
    """A pseudo-terminal: the side of the program, and all that it has received."""

    master: int
    stream: TextIO
    data: bytes = b""

    @property
    def received(self) -> str:
        return self.data.decode(errors="replace")

    def wait_for(self, text: str) -> None:
        while text not in self.received:
            assert select.select([self.master], [], [], 60)[0], f"{text!r} does not come"
            self.data += os.read(self.master, 4096)

    def resize(self, columns: int) -> None:
        termios.tcsetwinsize(self.master, (24, columns))

    def rest(self) -> str:
        while select.select([self.master], [], [], 0)[0]:
            self.data += os.read(self.master, 4096)
        return self.received


@contextmanager
def open_pty(columns: int, encoding: str = "utf-8") -> Iterator[Pty]:
    """Yield a pseudo-terminal of that width."""
    master, slave = os.openpty()
    with os.fdopen(slave, "w", encoding=encoding) as stream:
        pty = Pty(master, stream)
        pty.resize(columns)
        yield pty
    os.close(master)
