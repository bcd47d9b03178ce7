"""Continue a stream on another replica: leave out what the client has got already.

Answers do not depend on where they are computed, so the second stream has the same text. Ids and
times differ, so lines are matched by the text that they carry. A text that differs (sampling
without a seed) cannot be continued.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

_TEXTS = ("content", "response", "text", "thinking", "reasoning", "reasoning_content", "arguments")
_INSIDE = ("message", "delta", "choices", "function", "tool_calls")


class Differs(ValueError):
    """The second stream has another text than the first."""


class Resumable:
    """The lines of one answer to a client, over the streams of several replicas."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []  # pieces of an incomplete line of the current stream
        self._said: list[str] = []  # texts that the client has got
        self._since = 0  # lines that the client has got after the last one with text
        self._text = ""  # that the client had got when the current stream began
        self._at: int | None = None  # the place in it that a later stream has reached
        self._left = 0  # lines without text that it repeats after that

    def restart(self) -> None:
        """Begin a stream that repeats what was sent."""
        self._text = "".join(self._said)
        self._said, self._rest = [self._text], []
        self._at, self._left = 0, self._since

    def take(self, data: bytes, last: bool = False) -> bytes:
        """Return the whole lines of `data` that are new to the client. Raises Differs."""
        first, *lines = data.split(b"\n")
        self._rest.append(first)
        if lines:
            *lines, rest = [b"".join(self._rest), *lines]
            self._rest = [rest]
        if last and any(self._rest):
            lines, self._rest = [*lines, b"".join(self._rest)], []
        return b"".join(line + b"\n" for line in lines if self._new(line))

    def _new(self, line: bytes) -> bool:
        text = text_of(line)
        if self._at is None:
            self._said.append(text)
            self._since = 0 if text else self._since + 1
            return True
        if self._at < len(self._text):
            if not self._text.startswith(text, self._at):
                raise Differs("the answer differs on another replica")
            self._at += len(text)
            return False
        if not text and self._left:
            self._left -= 1
            return False
        self._at = None
        return self._new(line)


def text_of(line: bytes) -> str:
    """Return the text of an answer that a line of NDJSON or of an event stream carries."""
    data = line.removeprefix(b"data:").strip()
    if not data.startswith(b"{"):
        return ""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return ""
    if isinstance(found, Mapping) and isinstance(found.get("delta"), str):
        return str(found["delta"])  # OpenAI's Responses API
    return "".join(_texts(found))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, Mapping):
        for name in _TEXTS:
            if isinstance(value.get(name), str):
                yield value[name]
        if isinstance(value.get("partial_json"), str):
            yield value["partial_json"]
        for name in _INSIDE:
            yield from _texts(value.get(name))
