"""Test that a home of version 0.1.0 works: its model, EAMC, conversation and measurements.

The home is tests/data/homes/0.1.0.tar.gz. Its model is the demo's first layer with 8 of its
experts, pulled as q4. One request was answered; the conversation and the speeds are invented.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from moeinf.cli.main import answer
from moeinf.runtime.config import Settings
from moeinf.runtime.generation.saved_chats import SavedChat, saved_conversations
from moeinf.runtime.machine import measurements
from moeinf.runtime.machine.measurements import remembered_drive, remembered_ram

HOMES = Path(__file__).parents[3] / "data/homes"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with tarfile.open(HOMES / "0.1.0.tar.gz") as file:
        file.extractall(tmp_path, filter="data")
    monkeypatch.setenv("MOEINF_HOME", str(tmp_path))
    monkeypatch.setenv("MOEINF_NO_SERVER", "1")
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert answer([*arguments, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_the_model_answers_and_learns(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (listed,) = printed(capsys, "list")["models"]  # type: ignore[misc]
    assert (listed["name"], listed["tag"]) == ("old", "q4")
    assert printed(capsys, "verify", "old")["damaged"] == []
    before = printed(capsys, "eamc", "show", "old")
    assert (before["entries"], before["prompt_tokens"]) == (1, 17)
    said = printed(capsys, "run", "old", "--max-tokens", "6", "--no-server", "17+25=")
    assert (said["finish_reason"], said["tokens"]) == ("length", 6)
    log = home / "state/old/q4/eamc.log"
    assert not list(log.parent.glob("*.aside-*"))
    assert printed(capsys, "eamc", "show", "old")["prompt_tokens"] != 17  # it has the new request


def test_a_conversation_and_speeds_are_read(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(home=home)
    assert saved_conversations(settings) == [SavedChat("sums", "old:q4", 2)]
    ram = remembered_ram(settings)
    assert ram is not None
    assert ram.best == ("2 threads", 21e9)
    (key,) = json.loads((home / "state/devices.json").read_text())["drives"]
    monkeypatch.setattr(measurements, "drive_key", lambda *_: key)
    drive = remembered_drive(settings, settings.models)
    assert drive is not None
    assert (drive.thorough, drive.reading.direct, drive.reading.readers) == (True, True, 8)
