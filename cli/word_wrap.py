"""Wrap streamed text at word borders, for a terminal that shows each piece at once.

A word that crosses the edge is erased and written again on the next line. Code blocks and words
longer than a line are left to the terminal, so that copied text has no line ends of ours.
"""

from __future__ import annotations

from rich.cells import cell_len, get_character_cell_size

_LEAST_COLUMNS = 10
_TAB = 8
_FENCES = ("```", "~~~")


class WordWrap:
    """The cursor of a terminal, and the word and the code block that it is in."""

    def __init__(self) -> None:
        self.column = 0  # cells before the cursor; may exceed the edge by spaces that are left out
        self._word = ""  # since the last space, on this row; it can be erased
        self._too_long = False  # the current word has crossed the edge of a row of its own
        self._start = ""  # of the line: its first characters except spaces
        self._block = ""  # the fence that has opened a code block

    def add(self, text: str, columns: int) -> str:
        """Return the text with its line ends. columns: the terminal's width; 0: do not wrap.

        The text has no control characters except newline and tab.
        """
        if columns < _LEAST_COLUMNS:
            if text:
                self.column = 0 if text.endswith("\n") else 1
                self._word = ""
            return text
        if self.column > columns:  # the terminal has become narrower
            self.column, self._word = self.column % columns, ""
        return "".join(self._put(char, columns) for char in text)

    def end_answer(self) -> None:
        """Forget a code block that the text did not close."""
        self._block = self._start = ""

    def _put(self, char: str, columns: int) -> str:
        if char == "\n":
            self._end_line()
            return char
        if len(self._start) < len(_FENCES[0]):
            self._start += char.strip()
        blank = char in " \t"
        width = get_character_cell_size(char)
        if char == "\t":
            width = _TAB - self.column % _TAB
        if blank:
            self._too_long = False
        if self._block or self._start in _FENCES:
            self._word = ""
            return self._leave_to_terminal(char, width, columns)
        if self.column + width < columns:  # the last column stays free: some terminals wrap there
            self.column += width
            breaks = blank or width > 1  # a line may end after any wide character
            self._word = "" if breaks or self._too_long else self._word + char
            return char
        if blank:  # left out: the next word begins a line
            self.column, self._word = max(self.column, columns - 1), ""
            return ""
        if self._too_long:
            return self._leave_to_terminal(char, width, columns)
        return self._break_before(char, width, columns)

    def _break_before(self, char: str, width: int, columns: int) -> str:
        """Move the current word, which `char` continues, to the next line."""
        word = "" if width > 1 else self._word
        back = cell_len(word)
        if back and back >= self.column:
            self._too_long, self._word = True, ""
            return self._leave_to_terminal(char, width, columns)
        self.column = back + width
        self._word = "" if width > 1 else word + char
        return (f"\x1b[{back}D\x1b[K" if back else "") + f"\n{word}{char}"

    def _leave_to_terminal(self, char: str, width: int, columns: int) -> str:
        fits = self.column + width <= columns
        self.column = self.column + width if fits else width
        return char

    def _end_line(self) -> None:
        if self._start in _FENCES and not self._block:
            self._block = self._start
        elif self._start == self._block:
            self._block = ""
        self.column, self._word, self._start = 0, "", ""
        self._too_long = False
