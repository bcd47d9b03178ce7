"""Separate a model's thinking from its answer while the text streams.

Five formats are known: `<think>…</think>` (Qwen3, DeepSeek-R1, GLM-4.5), `[THINK]…[/THINK]`
(Mistral), `<|channel>thought … <channel|>` (Gemma 4), turns (Solar-Open) and harmony (gpt-oss). The
messages of harmony are

    <|channel|>NAME<|message|>TEXT<|end|>      NAME: analysis (thinking), commentary, final
    <|channel|>commentary to=functions.TOOL <|constrain|>json<|message|>ARGUMENTS<|call|>

A mark may be split across pieces anywhere. Text that may be the start of a mark is held back.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cache
from typing import Literal, Protocol

Kind = Literal["thinking", "answer", "call"]
OPEN, CLOSE = "<think>", "</think>"
_BRACKETS = "[THINK]", "[/THINK]"
_OPEN_CHANNEL, _CLOSE_CHANNEL = "<|channel>", "<channel|>"
_CHANNEL, _MESSAGE = "<|channel|>", "<|message|>"
_TURNS: dict[str, Kind] = {"<|think|>": "thinking", "<|content|>": "answer"}
_TURN_ENDS, _CALLS, _CALLS_END = ("<|end|>", "<|begin|>"), "<|tool_calls|>", "<|calls|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_START = "<|start|>"
MOST_CALL = 1 << 20  # characters of a call; a longer one is text
_RECIPIENT = re.compile(r"\bto=")
_FUNCTION = re.compile(r"\bto=functions\.([^\s<]+)")


class Parser(Protocol):
    """A parser that takes text in pieces and gives (kind, text) pieces. Texts are never empty."""

    def add(self, text: str) -> Iterator[tuple[Kind, str]]:
        """Parse a piece of text; yield what is certain so far."""
        ...

    def rest(self) -> Iterator[tuple[Kind, str]]:
        """Yield the held text at the end of the answer."""
        ...

    @property
    def answering(self) -> bool:
        """True if the next text belongs to the answer, unless it starts to think."""
        ...

    @property
    def held(self) -> int:
        """The number of characters of a call that has not ended."""
        ...


class _Marked(ABC):
    """A parser that cuts a stream at marks. Subclasses define the marks and their meaning."""

    def __init__(self, kind: Kind | None) -> None:
        self._kind = kind  # of the current text; None: it is not shown
        self._held = ""  # the possible start of a mark
        self._header: list[str] = []  # the text before it, if it is not shown
        self._fresh = True  # no text of this kind was shown yet; leading line ends are dropped

    def add(self, text: str) -> Iterator[tuple[Kind, str]]:
        text, at = self._held + text, 0
        while marks := self._marks():
            found = _any_of(marks).search(text, at)
            if found is None:
                break
            before, mark = "".join([*self._header, text[at : found.start()]]), found[0]
            self._header, at = [], found.end()
            if not self._is_mark(mark, before):
                yield from self._give(before + mark)
                continue
            yield from self._give(before)
            yield from self._met(mark, before)
        keep = max((overlap(text, mark) for mark in self._marks()), default=0)
        end = max(at, len(text) - keep)
        self._held = text[end:]
        if self._kind is None:  # a header is parsed when its mark has arrived
            self._header.append(text[at:end])
        else:
            yield from self._give(text[at:end])

    @property
    def answering(self) -> bool:
        return self._kind == "answer"

    @property
    def held(self) -> int:
        return 0

    def rest(self) -> Iterator[tuple[Kind, str]]:
        held, self._held = "".join([*self._header, self._held]), ""
        self._header = []
        yield from self._give(held)

    def _give(self, text: str) -> Iterator[tuple[Kind, str]]:
        if self._fresh:
            text = text.lstrip("\n")
        if text and self._kind is not None:
            self._fresh = False
            yield self._kind, text

    def _become(self, kind: Kind | None) -> None:
        self._kind, self._fresh = kind, True

    @abstractmethod
    def _marks(self) -> tuple[str, ...]:
        """Return the marks that are valid now."""

    def _is_mark(self, mark: str, before: str) -> bool:
        return True

    @abstractmethod
    def _met(self, mark: str, before: str) -> Iterator[tuple[Kind, str]]:
        """Handle a mark: change the kind of the text; give what the mark completes."""


class ThinkParser(_Marked):
    """The parser of one `<think>…</think>`, or of other marks, before the answer.

    inside: the prompt has already opened it. trims: drop line ends before thinking and answer.
    GLM-4.5 writes one before `<think>`, and one after a `</think>` of its prompt.
    """

    def __init__(
        self, inside: bool = False, trims: bool = False, marks: tuple[str, str] = (OPEN, CLOSE)
    ) -> None:
        super().__init__("thinking" if inside else "answer")
        self._open, self._close = marks
        self._fresh = inside or trims
        self._done = False

    def _marks(self) -> tuple[str, ...]:
        if self._done:
            return ()
        return (self._close,) if self._kind == "thinking" else (self._open,)

    def _give(self, text: str) -> Iterator[tuple[Kind, str]]:
        for piece in super()._give(text):
            if piece[0] == "answer" and piece[1].strip():
                self._done = True  # a <think> inside the answer is text
            yield piece

    def _is_mark(self, mark: str, before: str) -> bool:
        return mark != self._open or not before.strip()

    def _met(self, mark: str, before: str) -> Iterator[tuple[Kind, str]]:
        self._done = mark == self._close
        self._become("thinking" if mark == self._open else "answer")
        return iter(())


class ChannelParser(_Marked):
    """The parser of Gemma 4's channels, whose text is thinking. A channel begins with its name.

    The model may open another, empty channel after its answer, or close one that is not open.
    """

    def __init__(self) -> None:
        super().__init__("answer")

    def _marks(self) -> tuple[str, ...]:
        if self._kind == "answer":
            return (_OPEN_CHANNEL, _CLOSE_CHANNEL)
        return (_CLOSE_CHANNEL,) if self._kind == "thinking" else (_CLOSE_CHANNEL, "\n")

    def _met(self, mark: str, before: str) -> Iterator[tuple[Kind, str]]:
        named: Kind | None = None if mark == _OPEN_CHANNEL else "thinking"
        self._become("answer" if mark == _CLOSE_CHANNEL else named)
        return iter(())


class TurnsParser(_Marked):
    """The parser of Solar's turns, each `<|begin|>assistant<|think|>…<|end|>` or <|content|>.

    Calls have a turn `<|tool_calls|>…<|calls|>`, which is part of the answer. A prompt ends with
    `<|begin|>assistant`, so the stream starts with a mark. Without one all text is the answer.
    """

    def __init__(self) -> None:
        super().__init__(None)
        self._ends: tuple[str, ...] = _TURN_ENDS
        self._begun = False

    def rest(self) -> Iterator[tuple[Kind, str]]:
        if not self._begun:
            self._become("answer")
        yield from super().rest()

    def _marks(self) -> tuple[str, ...]:
        return (*_TURNS, _CALLS) if self._kind is None else self._ends

    def _met(self, mark: str, before: str) -> Iterator[tuple[Kind, str]]:
        self._begun = True
        opens = self._kind is None
        self._ends = (_CALLS_END,) if mark == _CALLS else _TURN_ENDS
        self._become(_TURNS.get(mark, "answer") if opens else None)
        return iter(())


class HarmonyParser(_Marked):
    """The parser of gpt-oss. `final`, and `commentary` without a recipient, are the answer.

    A prompt ends with `<|start|>assistant`, so the stream starts with a header. With parses_calls,
    a message to a function is given as ("call", "NAME ARGUMENTS") when it is complete.
    """

    def __init__(self) -> None:
        super().__init__(None)
        self.parses_calls = False
        self._function = ""
        self._arguments: list[str] = []
        self._size = 0  # characters of them

    @property
    def held(self) -> int:
        return self._size

    def rest(self) -> Iterator[tuple[Kind, str]]:
        yield from super().rest()
        yield from self._called()

    def _give(self, text: str) -> Iterator[tuple[Kind, str]]:
        for kind, piece in super()._give(text):
            if kind != "call":
                yield kind, piece
                continue
            self._arguments.append(piece)
            self._size += len(piece)
            if self._size > MOST_CALL:
                self._become("answer")
                yield "answer", self._taken()

    def _marks(self) -> tuple[str, ...]:
        return (_MESSAGE,) if self._kind is None else (*_ENDS, _START)

    def _met(self, mark: str, before: str) -> Iterator[tuple[Kind, str]]:
        if mark != _MESSAGE:
            yield from self._called()
            self._become(None)
            return
        function = _FUNCTION.search(before)
        if self.parses_calls and function is not None:
            self._function = function[1]
            self._become("call")
            return
        _, _, channel = before.rpartition(_CHANNEL)
        said = channel.split()[:1] == ["commentary"] and _RECIPIENT.search(before) is None
        self._become("answer" if said or channel.split()[:1] == ["final"] else "thinking")

    def _called(self) -> Iterator[tuple[Kind, str]]:
        """End a message; give the call if it was one."""
        if self._kind == "call":
            yield "call", f"{self._function} {self._taken()}"
            self._become(None)

    def _taken(self) -> str:
        """Return the arguments so far, and forget them."""
        taken = "".join(self._arguments)
        self._arguments, self._size = [], 0
        return taken


def is_harmony(template: str | None) -> bool:
    """Return True if a chat template writes harmony, whose special tokens must be decoded."""
    return template is not None and _CHANNEL in template and _MESSAGE in template


def has_channels(template: str | None) -> bool:
    """Return True if a chat template writes channels, whose special tokens must be decoded."""
    return template is not None and _OPEN_CHANNEL in template and _CLOSE_CHANNEL in template


def has_brackets(template: str | None) -> bool:
    """Return True if a chat template writes thinking in Mistral's marks, which are tokens."""
    return template is not None and all(mark in template for mark in _BRACKETS)


def has_turns(template: str | None) -> bool:
    """Return True if a chat template writes turns, whose special tokens must be decoded."""
    return template is not None and all(mark in template for mark in _TURNS)


def marks_of(template: str | None) -> tuple[str, str]:
    """Return the tokens that begin and end thinking in the answer of a template without harmony."""
    if has_channels(template):
        return _OPEN_CHANNEL, _CLOSE_CHANNEL
    return _BRACKETS if has_brackets(template) else (OPEN, CLOSE)


def thinks(template: str | None) -> bool:
    """Return True if a model with this chat template can think before it answers."""
    return template is not None and (
        is_harmony(template)
        or has_turns(template)
        or has_brackets(template)
        or any(word in template for word in (OPEN, CLOSE, "enable_thinking"))
    )


def thinking_variables(think: bool | str | None) -> dict[str, bool | str]:
    """Return the template's variables for thinking; a text is the effort, None sets no variable.

    Qwen3 and GLM use `enable_thinking`, Granite and DeepSeek-V3.1 `thinking`, and gpt-oss
    `reasoning_effort`.
    """
    if think is None:
        return {}
    effort = {"reasoning_effort": think} if isinstance(think, str) else {}
    return {**effort, "enable_thinking": bool(think), "thinking": bool(think)}


def parser_for(template: str | None, prompt: str) -> Parser:
    """Return the parser for a model's answer. prompt: the end of the prompt."""
    if is_harmony(template):
        return HarmonyParser()
    if has_channels(template):
        return ChannelParser()
    if has_turns(template):
        return TurnsParser()
    marks = marks_of(template)
    opened = prompt.rstrip().endswith(marks[0])
    return ThinkParser(inside=opened, trims=thinks(template), marks=marks)


@cache
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)))


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `mark`."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
