"""An answer as its reader wants it: what is thought, what is said, which tools are called.

Does not know tokens, models or APIs. Text comes in pieces that may be cut anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from moeinf.runtime.thinking import HarmonyParser, overlap, parser_for
from moeinf.runtime.tools import Call, Format, Tool, Unfinished, call_of, format_of

Said = tuple[Literal["thinking", "answer"], str] | Call


class Speech:
    """Takes an answer's text, gives (kind, text) pieces and calls. Texts are never empty.

    prompt: the end of what the model was shown. Without tools, nothing is taken to be a call.
    """

    def __init__(self, template: str | None, prompt: str, tools: Sequence[Tool] = ()) -> None:
        self._parser = parser_for(template, prompt)
        self._tools = tools
        if isinstance(self._parser, HarmonyParser):
            self._parser.hears_calls = bool(tools)
        form = format_of(template) if tools else None
        self._calls = _Calls(form, tools) if form is not None else None

    def add(self, text: str) -> Iterator[Said]:
        """What is certain now."""
        for kind, piece in self._parser.add(text):
            yield from self._said(kind, piece)

    def rest(self) -> Iterator[Said]:
        """What was held back, when no more will come."""
        for kind, piece in self._parser.rest():
            yield from self._said(kind, piece)
        if self._calls is not None:
            yield from self._calls.rest()

    def _said(self, kind: str, piece: str) -> Iterator[Said]:
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
    """Cuts calls out of an answer. White space around them is not part of it."""

    def __init__(self, form: Format, tools: Sequence[Tool]) -> None:
        self._form, self._tools = form, tools
        self._held = ""  # what may be the beginning of a mark; inside of a call: its body so far
        self._inside = False
        self._looked = 0  # how far into a body there is no mark of its end
        self._space = ""  # after what has been said: part of the answer once more is said
        self._called = False  # just now: what follows begins without space

    def add(self, text: str) -> Iterator[Said]:
        self._held += text
        while True:
            if not self._inside:
                place = self._held.find(self._form.open)
                if place < 0:
                    keep = overlap(self._held, self._form.open)
                    said, self._held = _cut(self._held, len(self._held) - keep)
                    yield from self._say(said)
                    return
                yield from self._say(self._held[:place])
                self._held = self._held[place + len(self._form.open) :]
                self._inside, self._looked = True, 0
            end = self._held.find(self._form.close, self._looked) if self._form.close else -1
            if end < 0:
                self._looked = max(self._looked, len(self._held) - len(self._form.close) + 1)
                return
            try:
                calls = self._form.read(self._held[:end], self._tools)
            except Unfinished:
                self._looked = end + len(self._form.close)
                continue
            body, self._held = _cut(self._held, end + len(self._form.close))
            yield from self._ended(body, calls)

    def rest(self) -> Iterator[Said]:
        held, self._held = self._held, ""
        if not self._inside:
            yield from self._say(held)
            if self._space and not self._called:
                yield "answer", self._space
            return
        try:
            calls = self._form.read(held, self._tools)
        except Unfinished:
            calls = []
        yield from self._ended(held, calls)

    def _ended(self, body: str, calls: list[Call]) -> Iterator[Said]:
        self._inside = False
        if calls:
            self._space, self._called = "", True
            yield from calls
        else:
            yield from self._say(self._form.open + body)

    def _say(self, text: str) -> Iterator[Said]:
        text = (self._space + text).lstrip() if self._called else self._space + text
        shown = text.rstrip()
        shown, self._space = _cut(text, len(shown))
        if shown:
            self._called = False
            yield "answer", shown


def _cut(text: str, place: int) -> tuple[str, str]:
    return text[:place], text[place:]
