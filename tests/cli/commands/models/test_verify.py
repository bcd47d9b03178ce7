"""Test that `moeinf verify` names every kind of damage and repairs it from the source."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from moeinf.runtime.library.library import DEMO_CHECKPOINT
from tests.cli.conftest import Command, command_in
from tests.hub_server import Hub, serve


@pytest.fixture
def own(tmp_path: Path, demo_home: Path) -> Command:
    """Return the command in a home whose demo names a source that still exists."""
    shutil.copytree(demo_home / "models", tmp_path / "models")
    return command_in(tmp_path)


def damage(folder: Path) -> dict[str, str]:
    """Damage four files in four ways; return the expected words per file."""
    flipped = folder / "experts/L003/E017.safetensors"
    raw = bytearray(flipped.read_bytes())
    raw[7777] ^= 4
    flipped.write_bytes(raw)
    cut = folder / "experts/L000/E000.safetensors"
    cut.write_bytes(cut.read_bytes()[:-5])
    (folder / "experts/L005/E031.safetensors").unlink()
    (folder / "config.json").write_text("{}")
    return {
        "experts/L003/E017.safetensors": "has different content",
        "experts/L000/E000.safetensors": "bytes instead of",
        "experts/L005/E031.safetensors": "is missing",
        "config.json": "bytes instead of",
    }


def test_a_whole_model(own: Command) -> None:
    result = own("verify", "demo")
    assert result.code == 0
    assert "all as they were pulled" in result.out


def test_damage_is_named_and_mended(own: Command, tmp_path: Path) -> None:
    folder = tmp_path / "models/demo/bf16"
    expected = damage(folder)
    result = own("verify", "demo", "--json")
    assert result.code == 1
    found = {d["path"]: d["problem"] for d in json.loads(result.out)["damaged"]}
    assert set(found) == set(expected)
    assert all(expected[path] in problem for path, problem in found.items())
    told = own("verify", "demo")
    assert told.code == 1
    assert "`moeinf verify demo:bf16 --repair`" in told.err
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*.safetensors")}
    mended = own("verify", "demo", "--repair")
    assert mended.code == 0
    assert mended.out.count(": repaired") == 4
    changed = [p for p, moment in before.items() if p.stat().st_mtime_ns != moment]
    assert len(changed) <= 2  # intact files are unchanged
    assert own("verify", "demo").code == 0
    assert own("run", "demo", "17+25=").out == "42\n"
    assert {p.name for p in folder.parent.iterdir()} == {"bf16", "f32"}


def test_dense_weights_are_mended_too(own: Command, tmp_path: Path) -> None:
    path = tmp_path / "models/demo/f32/dense.safetensors"
    path.write_bytes(path.read_bytes()[::-1])
    assert own("verify", "demo:f32", "--repair").code == 0
    assert own("run", "demo:f32", "17+25=").out == "42\n"


def test_from_the_hub_only_the_bytes_of_what_is_damaged(tmp_path: Path) -> None:
    with serve(Hub("Org/M", DEMO_CHECKPOINT)) as hub:
        run = command_in(tmp_path / "home")
        variables = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf")}
        assert run("pull", "Org/M", **variables).code == 0
        damage(tmp_path / "home/models/org--m/q4")
        hub.requests.clear()
        assert run("verify", "org--m", "--repair", **variables).code == 0
        assert sum(r.stop - r.start for r in hub.requests) < 3 * 49152 + 100_000
        assert run("verify", "org--m").code == 0


def test_a_source_that_has_changed_or_gone(own: Command, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(DEMO_CHECKPOINT, source)
    assert own("pull", str(source), "--name", "mine").code == 0
    damage(tmp_path / "models/mine/q4")
    (source / "config.json").write_text((source / "config.json").read_text() + " ")
    refused = own("verify", "mine", "--repair")
    assert refused.code == 1
    assert "has changed since" in refused.err
    shutil.rmtree(source)
    gone = own("verify", "mine", "--repair")
    assert gone.code == 1
    assert "is not a folder" in gone.err
