"""Write a line per request for `moeinf serve --verbose`.

Paths and names of fields come from clients, so that they are cut and escaped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

_MOST_CHARACTERS = 200  # of a path
_MOST_NAMES, _MOST_NAME = 16, 40  # fields, and characters of each


@dataclass
class RequestNotes:
    """The facts about one request that its endpoint adds to the line."""

    prompt_tokens: int | None = None
    tokens: int = 0
    ignored: list[str] = field(default_factory=list)

    def count(self, prompt_tokens: int, tokens: int) -> None:
        """Add the tokens of an answer, or of one embedded text."""
        self.prompt_tokens = (self.prompt_tokens or 0) + prompt_tokens
        self.tokens += tokens

    def ignore(self, names: Iterable[str]) -> None:
        """Add the fields of the request that have no effect here."""
        self.ignored = list(dict.fromkeys([*self.ignored, *names]))


def notes_of(request: Request) -> RequestNotes:
    """Return the notes of a request; without --verbose they are not read."""
    found = getattr(request.state, "notes", None)
    return found if isinstance(found, RequestNotes) else RequestNotes()


class RequestLog:
    """Wrap an ASGI app and write a line when an answer has ended."""

    def __init__(self, app: Any, say: Callable[[str], None]) -> None:
        self._app, self._say = app, say

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        notes, status, start = RequestNotes(), None, time.perf_counter()

        async def send_noted(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        scope = {**scope, "state": {**scope.get("state", {}), "notes": notes}}
        try:
            await self._app(scope, receive, send_noted)
        except Exception:
            status = status or 500  # a bug is answered outside this layer
            raise
        finally:
            milliseconds = (time.perf_counter() - start) * 1e3
            line = line_of(scope["method"], scope["path"], status, milliseconds, notes)
            with suppress(Exception):  # the listener has gone: no reason to end an answer
                self._say(line)


def line_of(
    method: str, path: str, status: int | None, milliseconds: float, notes: RequestNotes
) -> str:
    """Return the line of one request. status None: the client left before the answer began."""
    shown = "-" if status is None else str(status)
    parts = [f"{_plain(method, 16)} {_plain(path)} {shown} {milliseconds:.0f} ms"]
    if notes.prompt_tokens is not None:
        parts.append(f"{notes.prompt_tokens} prompt tokens")
        parts.append(f"{notes.tokens} tokens")
    if notes.ignored:
        names = [_plain(name, _MOST_NAME) for name in notes.ignored[:_MOST_NAMES]]
        more = "…" if len(notes.ignored) > _MOST_NAMES else ""
        parts.append(f"ignored: {' '.join(names)}{more}")
    return ", ".join(parts)


def _plain(text: str, most: int = _MOST_CHARACTERS) -> str:
    """Return printable ASCII: line ends and control characters are escapes."""
    shown = text[:most].encode("unicode_escape").decode("ascii")
    return shown if len(text) <= most else f"{shown}…"
