"""Conversations on disk: /save and /load. One JSON file each, readable by its owner only.

Does not know how conversations are held.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Protocol

from moeinf.errors import UnusableInput
from moeinf.runtime.atomic_files import make_folder_durably, write_text_durably
from moeinf.runtime.config import Settings
from moeinf.runtime.names import ModelName
from moeinf.runtime.regular_files import NotRegular, read_regular
from moeinf.runtime.requests import Message

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_ROLES = ("user", "assistant")


class Conversation(Protocol):
    """What is kept of one."""

    system: str
    messages: list[Message]

    def clear(self) -> None: ...


class BadConversation(UnusableInput, ValueError):
    """No conversation has that name, or its file cannot be read."""

    code = "bad_conversation"
    hint = "/save NAME, which keeps a conversation under that name"


def save_conversation(
    settings: Settings, name: str, model: ModelName, conversation: Conversation
) -> None:
    """Raises BadConversation for a name that is none."""
    path = _path(settings, name)
    make_folder_durably(path.parent)
    messages = [{"role": m.role, "content": m.content} for m in conversation.messages]
    about = {"model": str(model), "system": conversation.system, "messages": messages}
    write_text_durably(path, json.dumps(about, ensure_ascii=False, indent=1), mode=0o600)


def load_conversation(settings: Settings, name: str, conversation: Conversation) -> str:
    """Replaces the turns of `conversation`; returns the model it was held with."""
    path = _path(settings, name)
    try:
        about = json.loads(read_regular(path))
        messages = [Message(m["role"], str(m["content"])) for m in about["messages"]]
        system, model = str(about["system"]), str(about["model"])
    except FileNotFoundError:
        raise BadConversation(f"there is no conversation {name!r}") from None
    except NotRegular as error:
        raise BadConversation(f"{path} is {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadConversation(f"{path} is not a conversation: {error}") from error
    if any(m.role not in _ROLES for m in messages):
        raise BadConversation(f"{path} has a message of an unknown role")
    conversation.clear()
    conversation.system = system
    conversation.messages = messages
    return model


def _path(settings: Settings, name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise BadConversation(f"{name!r} is not a name: letters, digits, '_' and '-'")
    return settings.conversations / f"{name}.json"
