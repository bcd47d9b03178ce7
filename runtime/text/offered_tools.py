"""The tools that a request offers, and a model's calls of them.

Only a complete call of an offered tool is a call. So a client never receives a call of a function
that it did not name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moeinf.runtime.text.tool_values import load_json

Tool = Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}
Offered = Mapping[str, Mapping[str, Any]]  # functions by their names


@dataclass(frozen=True)
class Call:
    """A tool's name and its arguments as JSON values, which can be written as JSON again."""

    name: str
    arguments: dict[str, Any]

    def text(self) -> str:
        return json.dumps(self.arguments, ensure_ascii=False)


def names_of(tools: Sequence[Tool]) -> list[str]:
    """Return the names of functions; tools of other kinds are skipped."""
    return [str(function["name"]) for tool in tools if (function := _function(tool)).get("name")]


def by_name(tools: Sequence[Tool]) -> Offered:
    """Return functions by their names; the first of a name counts."""
    functions = [_function(tool) for tool in reversed(tools)]
    return {name: one for one in functions if isinstance(name := one.get("name"), str)}


def call_of(name: str, arguments: str, tools: Offered) -> Call | None:
    """Return the call, or None if its arguments are invalid or the tool was not offered."""
    return checked({"name": name, "arguments": arguments}, tools)


def checked(said: Any, tools: Offered) -> Call | None:
    """Return the call that `{"name": …, "arguments": …}` says, or None as in call_of."""
    if not isinstance(said, dict):
        return None
    name, arguments = said.get("name"), said.get("arguments", said.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = load_json(arguments.strip() or "{}")
        except ValueError:
            return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return Call(name, arguments) if name in tools else None


def all_or_none(found: Sequence[Call | None]) -> list[Call]:
    """Return all calls, or [] if one is invalid: a part of them may not be what the model meant."""
    calls = [call for call in found if call is not None]
    return calls if len(calls) == len(found) else []


def _function(tool: Tool) -> Mapping[str, Any]:
    found = tool.get("function", tool)
    return found if isinstance(found, Mapping) else {}
