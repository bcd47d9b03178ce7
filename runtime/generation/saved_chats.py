"""Keep conversations on disk, one JSON file each, readable by its owner only."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import msgspec
from msgspec import Struct

from moeinf.errors import UnusableInput, problem
from moeinf.runtime.config import Settings
from moeinf.runtime.files.atomic import make_folder_durably, write_bytes_durably
from moeinf.runtime.files.regular import NotRegular, read_regular
from moeinf.runtime.names import ModelName
from moeinf.runtime.requests import Message

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_MOST_BYTES = 64 << 20


class Conversation(Protocol):
    """The saved parts of a conversation."""

    system: str
    messages: list[Message]

    def clear(self) -> None: ...


class _Turn(Struct):
    role: Literal["user", "assistant"]
    content: str


class _Saved(Struct):
    """The file of a conversation."""

    model: str
    system: str
    messages: list[_Turn]


class BadConversation(UnusableInput, ValueError):
    """No conversation has that name, or its file cannot be read."""

    code = "bad_conversation"
    hint = "/save NAME, which keeps a conversation under that name"


@dataclass(frozen=True)
class SavedChat:
    """One saved conversation. A damaged file has no model, and `problem` says why."""

    name: str
    model: str = ""
    messages: int = 0
    problem: str = ""


def save_conversation(
    settings: Settings, name: str, model: ModelName, conversation: Conversation
) -> None:
    """Save a conversation. Raises BadConversation for an invalid name."""
    path = _path(settings, name)
    make_folder_durably(path.parent)
    messages = conversation.messages
    about = {"model": str(model), "system": conversation.system, "messages": messages}
    text = msgspec.json.format(msgspec.json.encode(about), indent=1)
    write_bytes_durably(path, text, mode=0o600)


def load_conversation(settings: Settings, name: str, conversation: Conversation) -> str:
    """Replace the turns of `conversation`; return the name of the model that it used.

    Raises BadConversation.
    """
    saved = _read(_path(settings, name))
    conversation.clear()
    conversation.system = saved.system
    conversation.messages = [Message(turn.role, turn.content) for turn in saved.messages]
    return saved.model


def is_saved(settings: Settings, name: str) -> bool:
    """Return True if a conversation has that name."""
    return bool(_NAME.fullmatch(name)) and os.path.lexists(_path(settings, name))


def saved_conversations(settings: Settings) -> list[SavedChat]:
    """Return every saved conversation in the order of names, damaged ones included."""
    found = []
    for path in sorted(settings.conversations.glob("*.json")):
        if not _NAME.fullmatch(path.stem):
            continue
        try:
            saved = _read(path)
            found.append(SavedChat(path.stem, saved.model, len(saved.messages)))
        except (BadConversation, OSError) as error:
            found.append(SavedChat(path.stem, problem=str(error)))
    return found


def delete_conversation(settings: Settings, name: str) -> None:
    """Remove a saved conversation, also a damaged one. Raises BadConversation, OSError."""
    try:
        _path(settings, name).unlink()
    except FileNotFoundError:
        raise BadConversation(f"there is no conversation {name!r}") from None


def _read(path: Path) -> _Saved:
    """Return the content of a file. Raises BadConversation."""
    try:
        return _SAVED.decode(read_regular(path, _MOST_BYTES))
    except FileNotFoundError:
        raise BadConversation(f"there is no conversation {path.stem!r}") from None
    except NotRegular as error:
        raise BadConversation(f"{path} cannot be read: {problem(error)}") from error
    except (ValueError, RecursionError) as error:
        raise BadConversation(f"{path} is not a conversation: {error}") from error


def _path(settings: Settings, name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise BadConversation(f"{name!r} is not a name: letters, digits, '_' and '-'")
    return settings.conversations / f"{name}.json"


# Made here, not at the first use: msgspec builds the tables of a type without a lock.
_SAVED = msgspec.json.Decoder(_Saved)
