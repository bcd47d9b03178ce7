"""Test what `moeinf devices` prints, stores and leaves; small sizes, so no figure is checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeinf.cli.commands.measuring import devices as command
from moeinf.cli.main import answer
from moeinf.runtime.machine.disk_bench import IN_FLIGHT, WHOLE_BLOCKS, Reading, Sweep
from tests.cli.conftest import check_document


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOEINF_HOME", str(tmp_path))
    monkeypatch.setattr(command, "_FILES_BYTES", 4 << 20)
    return tmp_path


def test_json_has_loops_and_sweep_and_choice(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(["devices", "--expert-size", "64KiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    check_document("devices", found)
    assert len(found["memory"]["loops_bytes_per_s"]) in (3, 6)  # 3 on a machine with one core
    assert found["memory"]["best_bytes_per_s"] == max(found["memory"]["loops_bytes_per_s"].values())
    disk = found["disk"]
    assert [int(n) for n in disk["buffered_bytes_per_s"]] == list(IN_FLIGHT)
    assert disk["read_bytes"] == 64 << 10
    assert disk["chosen"]["readers"] >= 4
    state = json.loads((home / "state" / "devices.json").read_text())
    assert state["drives"][disk["drive"]]["reading"]["readers"] == disk["chosen"]["readers"]
    assert list((home / "models").iterdir()) == []


def test_the_table_names_loops_and_ways(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["devices", "--expert-size", "64KiB", "--quiet"]) == 0
    text = capsys.readouterr().out
    assert "1 thread, prefetch, huge pages" in text
    assert "past the page cache (O_DIRECT)" in text
    assert "Chosen: " in text


@pytest.mark.parametrize(("buffered", "told"), [(1.9e9, True), (0.9e9, False)])
def test_a_choice_that_is_not_the_fastest_has_a_reason(
    home: Path,
    buffered: float,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reading = Reading(4, WHOLE_BLOCKS, True, 1e9, 1)
    speeds = (dict.fromkeys(IN_FLIGHT, one) for one in (1e9, buffered))
    found = Sweep(*speeds, {WHOLE_BLOCKS: 1e9}, reading, ())
    monkeypatch.setattr(command, "sweep", lambda *_: found)
    assert answer(["devices", "--expert-size", "64KiB", "--quiet"]) == 0
    assert ("The page cache is not twice as fast" in capsys.readouterr().out) is told


@pytest.mark.parametrize("size", ["1", "1GiB", "50%", "huge"])
def test_sizes_that_cannot_be_are_refused(home: Path, size: str) -> None:
    assert answer(["devices", "--expert-size", size]) == 2


def test_a_folder_that_is_missing_is_not_made(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    assert answer(["devices", "--folder", str(gone), "--expert-size", "64KiB"]) == 2
    assert f"--folder: {gone} is not a folder" in capsys.readouterr().err
    assert not gone.exists()
