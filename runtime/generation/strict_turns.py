"""Arrange messages for templates that take one system message, then turns that alternate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import dropwhile
from typing import Any

_SYSTEM = ("system", "developer")
_JOINED = ("system", "developer", "user")


def later_systems(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the system messages after the first turn."""
    turns = dropwhile(lambda message: message.get("role") in _SYSTEM, messages)
    return [message for message in turns if message.get("role") in _SYSTEM]


def strict_turns(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages in an order that every template takes.

    Coding agents send system messages between turns, and several turns of the user. A system
    message after the first turn becomes a turn of the user. Messages of the system, or of the
    user, that follow each other become one.
    """
    found: list[Mapping[str, Any]] = []
    texts: list[list[str]] = []  # of each message in `found`
    begun = False
    for message in messages:
        begun = begun or message.get("role") not in _SYSTEM
        if begun and message.get("role") in _SYSTEM:
            message = {**message, "role": "user"}
        text = str(message.get("content") or "")
        if found and message.get("role") in _JOINED and message["role"] == found[-1].get("role"):
            texts[-1].append(text)
        else:
            found.append(message)
            texts.append([text])
    return [
        message if len(said) == 1 else {**message, "content": "\n\n".join(filter(None, said))}
        for message, said in zip(found, texts, strict=True)
    ]
