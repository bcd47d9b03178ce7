"""Test the list of saved conversations, and their deletion."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from moeinf.runtime.config import Settings
from moeinf.runtime.generation.saved_chats import (
    BadConversation,
    SavedChat,
    delete_conversation,
    is_saved,
    load_conversation,
    save_conversation,
    saved_conversations,
)
from moeinf.runtime.names import ModelName
from moeinf.runtime.requests import Message

HELD = SimpleNamespace(system="", messages=[Message("user", "a"), Message("assistant", "b")])


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = Settings(tmp_path)
    for name in ("sums", "fruit"):
        save_conversation(settings, name, ModelName("demo", "bf16"), HELD)
    return settings


def test_saved_conversations_are_listed_by_name(settings: Settings) -> None:
    found = saved_conversations(settings)
    assert found == [SavedChat("fruit", "demo:bf16", 2), SavedChat("sums", "demo:bf16", 2)]
    assert saved_conversations(Settings(settings.home / "new")) == []


def test_a_damaged_file_is_listed_and_others_are_not(settings: Settings) -> None:
    folder = settings.conversations
    (folder / "fruit.json").write_text("{")
    (folder / "fifo.json").mkdir()
    (folder / "not a name.json").write_text("{}")
    (folder / "notes.txt").write_text("x")
    found = {chat.name: chat for chat in saved_conversations(settings)}
    assert sorted(found) == ["fifo", "fruit", "sums"]
    assert (found["sums"].problem, found["fruit"].model) == ("", "")
    assert "is not a conversation" in found["fruit"].problem
    assert "not a regular file" in found["fifo"].problem


def test_a_file_that_is_too_large_is_not_read(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moeinf.runtime.generation.saved_chats._MOST_BYTES", 20)
    with pytest.raises(BadConversation, match="too large"):
        load_conversation(settings, "sums", HELD)


def test_a_deleted_conversation_is_gone(settings: Settings) -> None:
    assert is_saved(settings, "sums")
    delete_conversation(settings, "sums")
    assert not is_saved(settings, "sums")
    assert [chat.name for chat in saved_conversations(settings)] == ["fruit"]
    with pytest.raises(BadConversation, match="there is no conversation 'sums'"):
        delete_conversation(settings, "sums")


@pytest.mark.parametrize("name", ["", "../fruit", "demo:bf16", "a/b"])
def test_other_names_lead_nowhere(name: str, settings: Settings) -> None:
    assert not is_saved(settings, name)
    with pytest.raises(BadConversation, match="is not a name"):
        delete_conversation(settings, name)
