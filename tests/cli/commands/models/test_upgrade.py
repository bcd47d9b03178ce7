"""Test that homes of version 0.1.0 work: model, conversation, prompts, EAMC and measurements.

tests/data/README.md tells how they were made: 0.1.0.tar.gz by `pull demo` and a conversation, and
0.1.0-q4.tar.gz with a model in q4, of the demo's first layer and 8 of its experts.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
from pathlib import Path

import pytest

from moeinf.cli.chat.local import LocalPartner, Opener
from moeinf.cli.chat.slash_commands import SlashCommands
from moeinf.cli.main import answer
from moeinf.cli.output import Output
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.generation.saved_chats import SavedChat, saved_conversations
from moeinf.runtime.library.library import Library
from moeinf.runtime.machine import measurements
from moeinf.runtime.machine.measurements import remembered_drive, remembered_ram
from moeinf.runtime.requests import Limits, SamplingOptions

HOMES = Path(__file__).parents[3] / "data/homes"
DEMO = Path("models/demo/bf16")
GREEDY = SamplingOptions(temperature=0)


def unpacked(name: str, home: Path, patch: pytest.MonkeyPatch) -> Path:
    with tarfile.open(HOMES / name) as file:
        file.extractall(home, filter="data")
    patch.setenv("MOEINF_HOME", str(home))
    patch.setenv("MOEINF_NO_SERVER", "1")
    return home


@pytest.fixture
def home(tmp_path: Path, demo_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return 0.1.0's home. Its weights are those that this version pulls, byte for byte."""
    home = unpacked("0.1.0.tar.gz", tmp_path, monkeypatch)
    files = json.loads((home / DEMO / "manifest.json").read_text())["files"]
    weights = [file for file in files if file["path"].endswith(".safetensors")]
    assert len(weights) == 1 + 6 * 32
    for file in weights:
        place = home / DEMO / file["path"]
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(demo_home / DEMO / file["path"], place)
        assert hashlib.sha256(place.read_bytes()).hexdigest() == file["sha256"], file["path"]
    return home


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert answer([*arguments, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_the_demo_answers_and_learns(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (listed,) = printed(capsys, "list")["models"]  # type: ignore[misc]
    assert (listed["name"], listed["tag"]) == ("demo", "bf16")
    assert printed(capsys, "verify", "demo")["damaged"] == []
    before = printed(capsys, "eamc", "show", "demo")
    assert before["entries"] == 2
    said = printed(capsys, "run", "demo", "--no-server", "reverse planet")
    assert (said["text"], said["finish_reason"]) == ("tenalp", "stop")
    assert printed(capsys, "eamc", "show", "demo")["entries"] == 3
    assert not list((home / "state/demo/bf16").glob("*.aside-*"))


def test_its_conversation_goes_on(home: Path) -> None:
    settings = Settings(home)
    assert saved_conversations(settings) == [SavedChat("sums", "demo:bf16", 4)]
    opener = Opener(EngineConfig(trace=False), settings)
    manifest, folder = Library(settings).read("demo")
    with LocalPartner(opener.open(manifest, folder), opener) as partner:
        commands = SlashCommands(partner, GREEDY, Limits(), settings, Output())
        commands.run("/load sums")
        assert [turn.content for turn in partner.messages] == [
            "17+25=", "42", "sort owl, fig, zebra, ant", "ant, fig, owl, zebra",
        ]  # fmt: skip
        pieces = partner.say("upper fig", GREEDY, Limits(), lambda: False)
        assert "".join(piece for kind, piece in pieces if kind == "answer") == "FIG"
        commands.run("/save sums")
    assert saved_conversations(settings) == [SavedChat("sums", "demo:bf16", 6)]


def test_its_speeds_are_read(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(home)
    ram = remembered_ram(settings)
    assert ram is not None
    assert ram.best == ("2 threads, prefetch, huge pages", 29338147768.010494)
    (key,) = json.loads((home / "state/devices.json").read_text())["drives"]
    monkeypatch.setattr(measurements, "drive_key", lambda *_: key)
    drive = remembered_drive(settings, settings.models)
    assert drive is not None
    assert (drive.thorough, drive.reading.direct, drive.reading.readers) == (True, True, 4)


def test_a_model_in_q4_answers_and_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = unpacked("0.1.0-q4.tar.gz", tmp_path, monkeypatch)
    assert printed(capsys, "verify", "old")["damaged"] == []
    before = printed(capsys, "eamc", "show", "old")
    assert (before["entries"], before["prompt_tokens"]) == (1, 17)
    said = printed(capsys, "run", "old", "--max-tokens", "6", "--no-server", "17+25=")
    assert (said["finish_reason"], said["tokens"]) == ("length", 6)
    assert not list((home / "state/old/q4").glob("*.aside-*"))
    assert printed(capsys, "eamc", "show", "old")["prompt_tokens"] != 17  # it has the new request
