"""Split an answer into thinking, text and tool calls, while it streams.

The text may be cut into pieces anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Literal

from moeinf.runtime.text.call_ends import Ends
from moeinf.runtime.text.marked_calls import FUNCTION_END, PARAMETER, skip_space
from moeinf.runtime.text.offered_tools import Call, Offered, Tool, by_name, call_of
from moeinf.runtime.text.reasoning import MOST_CALL, HarmonyParser, overlap, parser_for
from moeinf.runtime.text.tool_calls import Format, format_of
from moeinf.runtime.text.tool_values import Unfinished

_MOST_SPACE = 128  # around a function's name, with the next mark
_MOST_REFUSED = 32  # later calls without an opening mark are text
AnswerPart = tuple[Literal["thinking", "answer"], str] | Call


class AnswerParser:
    """A parser that takes an answer's text and gives (kind, text) pieces and calls.

    Texts are never empty. prompt: the end of the prompt. Without tools no call is recognised.
    """

    def __init__(self, template: str | None, prompt: str, tools: Sequence[Tool] = ()) -> None:
        self._parser = parser_for(template, prompt)
        self._tools = by_name(tools)
        if isinstance(self._parser, HarmonyParser):
            self._parser.parses_calls = bool(tools)
        form = format_of(template) if tools else None
        self._calls = _Calls(form, tools) if form is not None else None

    @property
    def held(self) -> int:
        """The number of characters of a call that has not ended."""
        return max(self._parser.held, 0 if self._calls is None else self._calls.held)

    def add(self, text: str) -> Iterator[AnswerPart]:
        """Parse a piece of text; yield what is certain so far."""
        for kind, piece in self._parser.add(text):
            yield from self._said(kind, piece)

    def rest(self) -> Iterator[AnswerPart]:
        """Yield the held text at the end of the answer."""
        for kind, piece in self._parser.rest():
            yield from self._said(kind, piece)
        if self._calls is not None:
            yield from self._calls.rest()

    def _said(self, kind: str, piece: str) -> Iterator[AnswerPart]:
        if kind == "thinking":
            yield "thinking", piece
        elif kind == "call":
            name, _, arguments = piece.partition(" ")
            call = call_of(name, arguments, self._tools)
            yield call if call is not None else ("answer", arguments)
        elif self._calls is not None:
            yield from self._calls.add(piece)
        else:
            yield "answer", piece


class _Open:
    """A call whose text is still arriving."""

    def __init__(self, form: Format) -> None:
        self.form = form
        self.size = 0  # characters
        self._pieces: list[str] = []
        self._read = 0  # pieces that end at an end mark
        self._ends: Ends | None = None  # after the first end mark that is part of the call

    def add(self, text: str) -> None:
        self._pieces.append(text)
        self.size += len(text)

    def text(self) -> str:
        return "".join(self._pieces)

    def calls(self, tools: Offered) -> list[Call] | None:
        """Return the calls that end here; None: the end mark here is part of the call."""
        piece = "".join(self._pieces[self._read :])
        self._read = len(self._pieces)
        if self._ends is not None and self._ends.unfinished(piece):
            return None
        body = self.text()
        try:
            return self.form.read(body, tools)
        except Unfinished:
            if self._ends is not None or self.form.ends is None:
                return []
        self._ends = self.form.ends(body)
        return None if self._ends.unfinished(body) else []


class _Calls:
    """The parser of calls within an answer. It drops white space around calls."""

    def __init__(self, form: Format, tools: Sequence[Tool]) -> None:
        self._form, self._tools = form, by_name(tools)
        self._text, self._at = "", 0  # what is not parsed yet, and the place of its first character
        self._open: _Open | None = None
        self._forms = (form,) if form.bare is None else (form, form.bare)
        self._most_head = _MOST_SPACE + max(map(len, self._tools), default=0)
        self._refused = 0  # calls without an opening mark
        self._complete = False  # the answer's text
        self._stray = False  # a call without an opening mark has ended; its closing mark may follow
        self._space: list[str] = []  # trailing space, given only if more text follows
        self._called = False  # the last output was a call: strip the space before the next text

    @property
    def held(self) -> int:
        """The number of characters of the open call."""
        return 0 if self._open is None else self._open.size

    def add(self, text: str) -> Iterator[AnswerPart]:
        self._text, self._at = self._text[self._at :] + text, 0
        more = True
        while more:
            parts, more = self._outside() if self._open is None else self._inside(self._open)
            yield from parts

    def rest(self) -> Iterator[AnswerPart]:
        self._complete = True
        yield from self.add("")
        while (call := self._open) is not None:
            call.add(self._text[self._at :])
            self._text, self._at = "", 0
            yield from self._ended(call, call.calls(self._tools) or [], "")
            yield from self.add("")
        yield from self._say(self._text[self._at :])
        self._text, self._at = "", 0
        if self._space and not self._called:
            yield "answer", "".join(self._space)

    def _outside(self) -> tuple[list[AnswerPart], bool]:
        """Parse up to the next call; return whether there is more to parse."""
        if self._stray and not self._skip_stray():
            return [], False
        found = _any_of(self._forms).search(self._text, self._at)
        if found is None:
            keep = max(overlap(self._text, form.open) for form in self._forms)
            end = max(self._at, len(self._text) - keep)
            return self._until(end), False
        form = next(form for form in self._forms if form.open == found[0])
        begins = form is self._form or self._begins(found.end())
        if begins is None:
            return self._until(found.start()), False
        said = self._until(found.start() if begins else found.end())
        if begins:
            self._at = found.end()
            self._open = _Open(form)
        return said, True

    def _until(self, end: int) -> list[AnswerPart]:
        begin, self._at = self._at, end
        return list(self._say(self._text[begin:end]))

    def _begins(self, at: int) -> bool | None:
        """Return whether a call without an opening mark goes on here; None: it may."""
        most = at + self._most_head
        name, mark, rest = self._text[at:most].partition(">")
        waits = not self._complete and len(self._text) < most
        if not mark:
            return None if waits else False
        if name.strip() not in self._tools or self._refused >= _MOST_REFUSED:
            return False
        rest = rest.lstrip()
        if rest.startswith((PARAMETER, FUNCTION_END)):
            return True
        if len(self._text) >= most or not any(
            m.startswith(rest) for m in (PARAMETER, FUNCTION_END)
        ):
            return False
        return not rest if self._complete else None

    def _inside(self, call: _Open) -> tuple[list[AnswerPart], bool]:
        """Parse up to the next end mark; return whether there is more to parse."""
        close = call.form.close
        begin, end = self._at, self._text.find(close, self._at) if close else -1
        if end < 0:
            keep = overlap(self._text, close) if close else 0
            self._at = max(begin, len(self._text) - keep)
            call.add(self._text[begin : self._at])
            if call.size <= MOST_CALL:
                return [], False
            return list(self._ended(call, [], "")), True
        self._at = end + len(close)
        call.add(self._text[begin:end])
        calls = call.calls(self._tools) if call.size <= MOST_CALL else []
        if calls is None:
            call.add(close)
            return [], True
        return list(self._ended(call, calls, close)), True

    def _skip_stray(self) -> bool:
        """Drop the closing mark of a call that had no opening one; return False if it may come.

        White space before it is dropped too: no text is given between the call and the mark.
        """
        self._at, close = skip_space(self._text, self._at), self._form.close
        held = self._text[self._at : self._at + len(close)]
        if close.startswith(held) and held != close and not self._complete:
            return False
        self._stray = False
        if held == close:
            self._at += len(close)
        return True

    def _ended(self, call: _Open, calls: list[Call], close: str) -> Iterator[AnswerPart]:
        """End a call: give its calls, or give its text if it has no valid call.

        If an unmarked call is invalid, give only its mark. Its body is parsed again and may have a
        call.
        """
        self._open = None
        if calls:
            self._space, self._called = [], True
            self._stray = call.form is not self._form
            yield from calls
        elif call.form is self._form:
            yield from self._say(call.form.open + call.text() + close)
        else:
            self._refused += 1
            self._text, self._at = call.text() + close + self._text[self._at :], 0
            yield from self._say(call.form.open)

    def _say(self, text: str) -> Iterator[AnswerPart]:
        text = text.lstrip() if self._called else text
        shown = text.rstrip()
        if shown:
            self._called = False
            yield "answer", "".join(self._space) + shown
            self._space = []
        if len(text) > len(shown):
            self._space.append(text[len(shown) :])


@cache
def _any_of(forms: tuple[Format, ...]) -> re.Pattern[str]:
    """Return a pattern of the marks that open calls."""
    return re.compile("|".join(re.escape(form.open) for form in forms))
