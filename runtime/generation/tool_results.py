"""Put results of tools into the turn that called them, for templates that look for them there.

The first chat template of Gemma 4 reads `tool_responses` of a turn, each with a name and a
response. It writes a message of the role `tool` as a turn of its own, which the model never saw.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from moeinf.runtime.request_json import parse

_KNOWS_ROLE = re.compile(r"[!=]=\s*['\"]tool['\"]")


def wants_results_in_turns(template: str | None) -> bool:
    """Return True if a template reads results in the turn that called, and nowhere else."""
    return (
        template is not None
        and "tool_responses" in template
        and _KNOWS_ROLE.search(template) is None
    )


def results_in_turns(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose results of tools are in the turn with the calls before them.

    Calls and results have ids. A result without a call before it stays a message.
    """
    found: list[dict[str, Any]] = []
    called: dict[Any, Any] | None = None  # the names of the last turn's calls, after its results
    for message in messages:
        last = found[-1] if found else {}
        if message["role"] != "tool" or not last.get("tool_calls"):
            found.append(message)
            called = None
            continue
        if called is None:
            called = {call["id"]: call["function"].get("name") for call in last["tool_calls"]}
            last = found[-1] = {**last, "tool_responses": list(last.get("tool_responses", ()))}
        name = called.get(message.get("tool_call_id")) or message.get("name")
        result = {"name": name or "unknown", "response": _value(message["content"])}
        last["tool_responses"].append(result)
    return found


def _value(text: str) -> Any:
    """Return the object that a result is in JSON, or its text."""
    try:
        value = parse(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text
