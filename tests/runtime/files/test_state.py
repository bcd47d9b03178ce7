"""State files: a damaged entry hides no others, an unknown one stays, a hostile file is ignored."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from msgspec.json import Decoder

from moeinf.runtime.checkpoints.checkpoint import open_checkpoint
from moeinf.runtime.config import Settings
from moeinf.runtime.files.state import entries_of, entry_of, read_entries, write_entries
from moeinf.runtime.generation.saved_chats import (
    BadConversation,
    load_conversation,
    save_conversation,
)
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from moeinf.runtime.library.repacking.repack import prospects
from moeinf.runtime.library.sources import LocalSource
from moeinf.runtime.machine.measurements import measured_path, remember_gpu, remembered_bus
from moeinf.runtime.names import ModelName
from moeinf.runtime.placement.decode_speed import remember_speed, remembered_speed
from moeinf.runtime.requests import Message

MODEL = ModelName("demo", "bf16")


def test_a_damaged_entry_hides_no_other_and_unknown_ones_stay(tmp_path: Path) -> None:
    settings = Settings(tmp_path)
    remember_speed(settings, MODEL, 8, 100, 4.0)
    (path,) = tmp_path.rglob("speeds.json")
    written = json.loads(path.read_text())
    written |= {"9": {"tokens_per_s": "fast"}, "note": [1, {"kept": None}], "7": {}}
    path.write_text(json.dumps(written))
    remember_speed(settings, MODEL, 16, 100, 2.0)
    assert remembered_speed(settings, MODEL, 9) is None
    assert remembered_speed(settings, MODEL, 7) is None
    for slots, speed in ((8, 25.0), (16, 50.0)):
        found = remembered_speed(settings, MODEL, slots)
        assert found is not None
        assert found.tokens_per_s == speed
    kept = json.loads(path.read_text())
    assert kept["note"] == [1, {"kept": None}]
    assert list(kept) == ["8", "9", "note", "7", "16"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'{"a": NaN}',
        b'{"a": 1}}',
        b'{"a": ' + b"[" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a": {"b": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
        b"\xff\xfe",
    ],
)
def test_hostile_files_have_no_entries(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(data)
    assert read_entries(path) == {}
    write_entries(path, {"a": {"b": 1}})
    assert entry_of(entries_of(read_entries(path), "a"), "b", Decoder(int)) == 1
    assert entry_of(entries_of(read_entries(path), "a"), "b", Decoder(str)) is None
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_gpu_keeps_what_was_measured_before(tmp_path: Path) -> None:
    settings = Settings(tmp_path)
    path = measured_path(settings)
    path.parent.mkdir()
    path.write_text(json.dumps({"version": 1, "gpus": {"A": {"more": 1}, "B": 3}, "later": {}}))
    remember_gpu(settings, "A", bus_bytes_per_s=2e10)
    found = remembered_bus(settings, "A")
    assert found is not None
    assert found[0] == 2e10
    assert remembered_bus(settings, "B") is None
    state = json.loads(path.read_text())
    assert (state["gpus"]["A"]["more"], state["gpus"]["B"], state["later"]) == (1, 3, {})
    path.write_text(json.dumps({**state, "version": 2}))
    assert remembered_bus(settings, "A") is None


class _Held:
    """A conversation."""

    def __init__(self) -> None:
        self.system, self.messages = "be kind", [Message("user", "hä?"), Message("assistant", "ja")]

    def clear(self) -> None:
        self.system, self.messages = "", []


def test_a_conversation_comes_back_and_a_changed_one_is_refused(tmp_path: Path) -> None:
    settings, held = Settings(tmp_path), _Held()
    save_conversation(settings, "mine", MODEL, held)
    fresh = _Held()
    fresh.clear()
    assert load_conversation(settings, "mine", fresh) == "demo:bf16"
    assert (fresh.system, fresh.messages) == (held.system, held.messages)
    path = settings.conversations / "mine.json"
    about = json.loads(path.read_text())
    for change in (
        {"messages": [{"role": "system", "content": "x"}]},
        {"messages": [{"role": "user"}]},
        {"messages": {"role": "user"}},
        {"model": None},
    ):
        path.write_text(json.dumps({**about, **change}))
        with pytest.raises(BadConversation, match=r"mine\.json is not a conversation"):
            load_conversation(settings, "mine", fresh)
    assert fresh.messages == held.messages  # unchanged


def test_a_folder_whose_name_is_not_utf8_is_written_as_text(tmp_path: Path) -> None:
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    source = LocalSource(open_checkpoint(DEMO_CHECKPOINT), folder)
    manifests = prospects(source, ModelName("demo", "q8"))
    sources = {manifest.source for manifest in manifests.values()}
    assert sources == {f"{tmp_path}/\ufffd"}
