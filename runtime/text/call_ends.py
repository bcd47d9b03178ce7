"""Find out, in linear time, whether an end mark ends a call or is part of one of its strings.

An object of `Ends` takes a call's text once, cut at the end marks that were part of it so far.
"""

from __future__ import annotations

import re
from typing import Protocol

from moeinf.runtime.text.tool_values import BareKeys, PythonCalls, Unfinished

_MOST_DEPTH, _MOST_DIGITS = 1000, 4000  # deeper values and longer numbers are invalid
_IN_STRING = re.compile(
    r'[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+'
)
_TOKEN = re.compile(
    r"[ \t\n\r]*+(?:(?P<mark>[\[\]{},:\"])|(?P<word>true|false|null"
    r"|-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][-+]?[0-9]++)?+)|(?P<end>\Z))"
)
_VALUE, _KEY, _COLON, _AFTER = "value", "key", "colon", "after"


class Ends(Protocol):
    """The text of one call, which an end mark may interrupt."""

    def unfinished(self, text: str) -> bool:
        """Take the text up to the next end mark; return whether that mark is part of the call."""
        ...


class Closed:
    """A call that ends with another mark before its end mark."""

    def __init__(self, mark: str) -> None:
        self._mark = mark

    def unfinished(self, text: str) -> bool:
        return not text.rstrip().endswith(self._mark)


class Paired:
    """A call that has as many closing marks of its values as opening ones."""

    def __init__(self, open: str, close: str) -> None:
        self._open, self._close, self._more = open, close, 0

    def unfinished(self, text: str) -> bool:
        self._more += text.count(self._open) - text.count(self._close)
        return self._more > 0


class Converted:
    """A call in Python's or Gemma's form, which is complete where its conversion ends."""

    def __init__(self, reader: PythonCalls | BareKeys) -> None:
        self._reader = reader

    def unfinished(self, text: str) -> bool:
        try:
            self._reader.add(text)
        except Unfinished:
            return True
        except ValueError:
            return False
        return False


class Begun:
    """A call whose text means something from a mark on. keep: the mark belongs to that text."""

    def __init__(self, ends: Ends, mark: str, keep: bool = True) -> None:
        self._ends, self._mark, self._keep = ends, mark, keep
        self._begun = False

    def unfinished(self, text: str) -> bool:
        if not self._begun:
            self._begun = True
            _, mark, rest = text.partition(self._mark)
            text = mark + rest if self._keep else rest
        return self._ends.unfinished(text)


class JsonText:
    """JSON, which an end mark may interrupt inside a string."""

    def __init__(self) -> None:
        self._inside = False  # a string
        self._held = ""  # a backslash at the end of the text
        self._expected = _VALUE
        self._open: list[str] = []  # the closing brackets of open values
        self._first = False  # the open value is still empty

    def unfinished(self, text: str) -> bool:
        """See Ends. Invalid JSON and JSON without an open string are finished."""
        text = self._held + text
        at = 0
        while True:
            if self._inside:
                at = self._string(text, at)
                if self._inside:
                    return at >= 0
            token = _TOKEN.match(text, at)
            if token is None or token.lastgroup == "end" or not self._takes(token):
                return False
            at = token.end()

    def _string(self, text: str, at: int) -> int:
        """Return the place behind a string's end, or -1 where it is invalid."""
        found = _IN_STRING.match(text, at)
        end = at if found is None else found.end()
        self._held = text[end:] if text[end:] == "\\" else ""
        if end == len(text) or self._held:
            return end
        if text[end] != '"':
            return -1
        self._inside = False
        return end + 1

    def _takes(self, token: re.Match[str]) -> bool:
        """Advance past a token; return whether it may be there."""
        word, expected = token[token.lastgroup or 0], self._expected
        closes = bool(self._open) and word == self._open[-1]
        if closes and (expected == _AFTER or self._first):
            self._open.pop()
            self._expected, self._first = _AFTER, False
            return True
        self._first = False
        if word == '"' and expected in (_VALUE, _KEY):
            self._inside = True
            self._expected = _COLON if expected == _KEY else _AFTER
            return True
        if expected == _COLON:
            self._expected = _VALUE
            return word == ":"
        if expected == _AFTER:
            self._expected = _KEY if self._open[-1:] == ["}"] else _VALUE
            return word == "," and bool(self._open)
        if expected == _KEY:
            return False
        if word in "[{":
            self._open.append({"[": "]", "{": "}"}[word])
            self._expected, self._first = (_KEY if word == "{" else _VALUE), True
            return len(self._open) <= _MOST_DEPTH
        self._expected = _AFTER
        return token.lastgroup == "word" and len(word) <= _MOST_DIGITS
