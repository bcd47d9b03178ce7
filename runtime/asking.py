"""What is asked of a model: messages, and when an answer ends.

Does not know engines: whoever asks a server has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant"]
Form = str | dict[str, Any] | None  # of an answer: "json", or a JSON schema


@dataclass(frozen=True)
class Message:
    role: Role
    content: str


@dataclass(frozen=True)
class Limits:
    """When to end: after max_tokens (None: at the context's end), or before a `stop` text."""

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
