"""Describe the tools of Anthropic's that a client runs itself, and sends by their types alone.

Claude has learned them. Any other model needs their schemas, which are those of Anthropic's
documentation.
"""

from __future__ import annotations

import re
from typing import Any

_TYPE = re.compile(r"(bash|text_editor|memory)_(2[0-9]{7})")
_RENAMED = "20250429"  # from this version on, insert has insert_text, and undo_edit is gone
_TEXT: dict[str, Any] = {"type": "string"}
_LINES: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
_FILE = {
    "path": _TEXT, "view_range": _LINES, "file_text": _TEXT, "old_str": _TEXT, "new_str": _TEXT,
    "insert_line": {"type": "integer"},
}  # fmt: skip
_COMMANDS = ("view", "create", "str_replace", "insert")


def described(kind: str | None) -> tuple[str, dict[str, Any]] | None:
    """Return the description and the input's schema of a tool of that type; None: no such type."""
    found = _TYPE.fullmatch(kind or "")
    if found is None:
        return None
    tool, version = found.groups()
    if tool == "bash":
        fields = {"command": _TEXT, "restart": {"type": "boolean"}}
        words = "Runs a command in a shell that stays open. restart: true starts the shell again."
        return words, {"type": "object", "properties": fields}
    newer = {"insert_text": _TEXT}
    if tool == "memory":
        paths = {"old_path": _TEXT, "new_path": _TEXT}
        words = "Reads and changes files that are kept between conversations, under /memories."
        return words, _of_commands((*_COMMANDS, "delete", "rename"), {**_FILE, **newer, **paths})
    words = "Views, creates and changes text files. view_range: the first and the last line."
    if version < _RENAMED:
        return words, _of_commands((*_COMMANDS, "undo_edit"), _FILE, "path")
    return words, _of_commands(_COMMANDS, {**_FILE, **newer}, "path")


def _of_commands(commands: tuple[str, ...], fields: dict[str, Any], *more: str) -> dict[str, Any]:
    """Return the schema of an object with a command; more: other fields that it needs."""
    command = {"type": "string", "enum": list(commands)}
    properties = {"command": command, **fields}
    return {"type": "object", "properties": properties, "required": ["command", *more]}
