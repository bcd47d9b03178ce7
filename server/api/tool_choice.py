"""Choose the tools that a model may call, and read how much it is to think."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from fastapi import Request

from moeinf.server.api.answers import BadRequest
from moeinf.server.http.request_log import notes_of

_EFFORTS: dict[str | None, bool | str | None] = {
    None: None, "none": False, "minimal": "low", "low": "low", "medium": "medium", "high": "high",
    "xhigh": "high", "max": "high",
}  # fmt: skip


class Typed(Protocol):
    """A tool of a request; type None is the client's own."""

    type: str | None
    name: str | None


Tool = TypeVar("Tool", bound=Typed)


def own_tools(tools: Sequence[Tool], own: str, request: Request) -> list[Tool]:
    """Return the tools that the client runs itself, which have the type `own`.

    Tools that a service would run are skipped and noted. Raises BadRequest for a request that has
    no others, and for a tool without a name.
    """
    found = [tool for tool in tools if tool.type in (None, own)]
    others = [str(tool.type)[:64] for tool in tools if tool.type not in (None, own)]
    if others and not found:
        words = f"tools: the type {others[0]!r} is not supported (expected {own})"
        raise BadRequest(words, "tools")
    if not all(tool.name for tool in found):
        raise BadRequest("tools: a tool has no name", "tools")
    notes_of(request).ignore(f"tools.{kind}" for kind in others)
    return found


def chosen_tools(
    offered: Sequence[dict[str, Any]], choice: str | None, name: str | None = None
) -> tuple[list[dict[str, Any]], bool]:
    """Return the offered tools in the templates' form, and whether one must be called.

    choice: none, auto or required; None is auto. name: the tool that must be called. Raises
    BadRequest.
    """
    if name is not None:
        found = [tool for tool in offered if tool["function"]["name"] == name]
        if not found:
            raise BadRequest(
                f"tool_choice: {name!r} is invalid (expected the name of a tool in tools)"
            )
        return found, True
    if choice == "none":
        return [], False
    if choice == "required" and not offered:
        raise BadRequest("tool_choice: the request has no tools")
    return list(offered), choice == "required"


def effort_of(said: str | None, field: str = "reasoning_effort") -> bool | str | None:
    """Return an effort in the templates' form. Raises BadRequest."""
    if said not in _EFFORTS:
        raise BadRequest(f"{field}: {said!r} is invalid (expected none, low, medium or high)")
    return _EFFORTS[said]
