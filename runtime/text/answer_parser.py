"""Split an answer into thinking, text and tool calls, while it streams.

The text may be cut into pieces anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Literal

from moeinf.runtime.text.offered_tools import Call, Tool, call_of
from moeinf.runtime.text.reasoning import HarmonyParser, overlap, parser_for
from moeinf.runtime.text.tool_calls import Format, format_of
from moeinf.runtime.text.tool_values import Unfinished

AnswerPart = tuple[Literal["thinking", "answer"], str] | Call


class AnswerParser:
    """A parser that takes an answer's text and gives (kind, text) pieces and calls.

    Texts are never empty. prompt: the end of the prompt. Without tools no call is recognised.
    """

    def __init__(self, template: str | None, prompt: str, tools: Sequence[Tool] = ()) -> None:
        self._parser = parser_for(template, prompt)
        self._tools = tools
        if isinstance(self._parser, HarmonyParser):
            self._parser.parses_calls = bool(tools)
        form = format_of(template) if tools else None
        self._calls = _Calls(form, tools) if form is not None else None

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


class _Calls:
    """The parser of calls within an answer. It drops white space around calls."""

    def __init__(self, form: Format, tools: Sequence[Tool]) -> None:
        self._form, self._tools = form, tools
        self._held = ""  # a possible start of a mark; within a call: its body so far
        self._inside: Format | None = None  # the format of the open call, whose body is held
        self._forms = (form,) if form.bare is None else (form, form.bare)
        self._stray = False  # a call without an opening mark has ended; its closing mark may follow
        self._looked = 0  # the body has no closing mark before this place
        self._space = ""  # trailing space, given only if more text follows
        self._called = False  # the last output was a call: strip the space before the next text

    def add(self, text: str) -> Iterator[AnswerPart]:
        self._held += text
        while True:
            if self._inside is None:
                if self._stray and not self._skip_stray():
                    return
                found = [(p, f) for f in self._forms if (p := self._held.find(f.open)) >= 0]
                if not found:
                    keep = max(overlap(self._held, form.open) for form in self._forms)
                    said, self._held = _cut(self._held, len(self._held) - keep)
                    yield from self._say(said)
                    return
                place, self._inside = min(found, key=itemgetter(0))
                yield from self._say(self._held[:place])
                self._held = self._held[place + len(self._inside.open) :]
                self._looked = 0
            form = self._inside
            end = self._held.find(form.close, self._looked) if form.close else -1
            if end < 0:
                self._looked = max(self._looked, len(self._held) - len(form.close) + 1)
                return
            try:
                calls = form.read(self._held[:end], self._tools)
            except Unfinished:
                self._looked = end + len(form.close)
                continue
            yield from self._ended(form, end + len(form.close), calls)

    def rest(self) -> Iterator[AnswerPart]:
        while (form := self._inside) is not None:
            try:
                calls = form.read(self._held, self._tools)
            except Unfinished:
                calls = []
            yield from self._ended(form, len(self._held), calls)
            yield from self.add("")
        yield from self._say(self._held)
        self._held = ""
        if self._space and not self._called:
            yield "answer", self._space

    def _skip_stray(self) -> bool:
        """Drop the closing mark of a call that had no opening one; return False if it may come."""
        held, close = self._held.lstrip(), self._form.close
        if close.startswith(held) and held != close:
            return False
        self._stray = False
        if held.startswith(close):
            self._held = held[len(close) :]
        return True

    def _ended(self, form: Format, size: int, calls: list[Call]) -> Iterator[AnswerPart]:
        """End a call: give its calls, or give its text if it has no valid call.

        If an unmarked call is invalid, give only its mark. Its body is parsed again and may have a
        call.
        """
        self._inside = None
        if calls:
            self._held = self._held[size:]
            self._space, self._called = "", True
            self._stray = form is not self._form
            yield from calls
        elif form is self._form:
            body, self._held = _cut(self._held, size)
            yield from self._say(form.open + body)
        else:
            yield from self._say(form.open)

    def _say(self, text: str) -> Iterator[AnswerPart]:
        text = (self._space + text).lstrip() if self._called else self._space + text
        shown = text.rstrip()
        shown, self._space = _cut(text, len(shown))
        if shown:
            self._called = False
            yield "answer", shown


def _cut(text: str, place: int) -> tuple[str, str]:
    return text[:place], text[place:]
