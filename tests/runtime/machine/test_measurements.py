"""Measure a drive and store the result: choices from given figures, files, modes."""

from __future__ import annotations

import errno
import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeinf.native import SlotPool
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.library.library import Library
from moeinf.runtime.machine import disk_bench as drives
from moeinf.runtime.machine.disk_bench import (
    WHOLE_BLOCKS,
    FileRange,
    Reading,
    _choose,
    read_once,
    sweep,
    written_files,
)
from moeinf.runtime.machine.measurements import (
    DEFAULT_READING,
    Drive,
    Ram,
    drive_key,
    forget_drive,
    remember,
    remembered_drive,
    remembered_ram,
)
from moeinf.runtime.placement import bandwidth as measuring
from moeinf.runtime.placement.bandwidth import check_drive, drive_of, measure
from moeinf.runtime.sizes import parse_memory

READING = Reading(readers=5, block_bytes=1 << 20, direct=True, bytes_per_s=2e9, in_flight=4)
DRIVE = Drive(READING, True, 4 << 20, "2026-01-02T03:04:05+00:00", ("a note",))
RAM = Ram({"1 thread": 1e10, "2 threads": 2e10}, "2026-01-02T03:04:05+00:00")


def nobody(*_: int) -> None:
    """Ignore progress."""


def test_a_sweep_reads_real_files_and_leaves_none(tmp_path: Path) -> None:
    seen = []
    with written_files(tmp_path, 3 * 4096, 12, nobody) as pieces:
        assert len(list(tmp_path.iterdir())) == 12
        assert all(piece.path.stat().st_size == 3 * 4096 for piece in pieces)
        assert len({piece.path.read_bytes() for piece in pieces}) == 12  # all pieces differ
        swept = sweep(pieces, lambda done, total: seen.append((done, total)), (1, 4), rounds=1)
    assert list(tmp_path.iterdir()) == []
    assert set(swept.buffered) == {1, 4}
    assert set(swept.direct) in ({1, 4}, set())
    assert swept.chosen.bytes_per_s > 0
    assert swept.chosen.readers >= 4
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]


def test_the_fewest_reads_that_are_nearly_best_are_chosen(monkeypatch, tmp_path: Path) -> None:
    speeds = {(1, True): 10.0, (8, True): 96.0, (32, True): 100.0, (1, False): 50.0}
    blocks = {WHOLE_BLOCKS: 96.0, 1 << 20: 99.0, 256 << 10: 200.0}

    def given(pieces, arena, in_flight, direct, block_bytes):
        if block_bytes != WHOLE_BLOCKS:
            assert (in_flight, direct) == (8, True)
            return blocks[block_bytes]
        return speeds.get((in_flight, direct), 20.0)

    monkeypatch.setattr(drives, "read_once", given)
    monkeypatch.setattr(drives, "drop_from_cache", lambda _: False)
    swept = sweep([FileRange(tmp_path / "x", 0, 4096)], nobody, (1, 8, 32))
    assert swept.chosen == Reading(10, 256 << 10, True, 200.0, 8)  # demand reads add 2
    assert swept.notes == ("the page cache could not be kept out: buffered figures are too high",)
    blocks[256 << 10] = 98.0
    assert sweep([FileRange(tmp_path / "x", 0, 4096)], nobody, (1, 8, 32)).chosen.block_bytes == (
        WHOLE_BLOCKS
    )


def test_a_file_system_without_direct_reads_is_told(monkeypatch, tmp_path: Path) -> None:
    real = os.open

    def refusing(path, flags, *mode):
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
        return real(path, flags, *mode)

    with written_files(tmp_path, 4096, 4, nobody) as pieces:
        monkeypatch.setattr(os, "open", refusing)
        swept = sweep(pieces, nobody, (1, 2), rounds=1)
        assert read_once(pieces, SlotPool(2, 4096), 2, True, WHOLE_BLOCKS) is None
    assert swept.direct == {}
    assert not swept.chosen.direct
    assert "refuses O_DIRECT" in swept.notes[0]


@pytest.mark.parametrize(
    ("direct", "buffered", "chosen"),
    [
        ({2: 1.0, 8: 1.2}, {2: 2.3, 8: 2.0}, (8, True)),
        ({2: 1.2, 8: 1.2}, {2: 2.3, 8: 2.0}, (2, True)),
        ({2: 1.0, 8: 1.0}, {2: 1.9, 8: 2.1}, (8, False)),
        ({}, {2: 1.0, 8: 1.0}, (2, False)),
    ],
)
def test_the_page_cache_must_be_much_faster(
    direct: dict[int, float], buffered: dict[int, float], chosen: tuple[int, bool]
) -> None:
    found = _choose(direct, buffered)
    assert (found.in_flight, found.direct) == chosen
    assert found.bytes_per_s == (direct if found.direct else buffered)[found.in_flight]


def test_a_file_that_ends_early_is_an_error(tmp_path: Path) -> None:
    folders = (tmp_path, tmp_path / "more")
    folders[1].mkdir()
    with written_files(folders, 4096, 5, nobody) as pieces:
        assert [piece.path.parent for piece in pieces] == [*folders, *folders, folders[0]]
    with written_files(tmp_path, 8192, 2, nobody) as pieces:
        os.truncate(pieces[1].path, 4096)
        with pytest.raises(OSError, match="ends early") as caught:
            read_once(pieces, SlotPool(2, 8192), 2, False, WHOLE_BLOCKS)
    assert caught.value.errno == errno.ENODATA


def test_what_was_measured_is_remembered_per_drive(tmp_path: Path) -> None:
    settings = Settings(tmp_path / "home")
    assert remembered_drive(settings, tmp_path) is None
    assert remembered_ram(settings) is None
    remember(settings, ram=RAM)
    remember(settings, drive=(tmp_path / "not" / "yet", DRIVE))
    assert remembered_drive(settings, tmp_path) == DRIVE
    assert remembered_drive(settings, tmp_path, tmp_path) is None  # two drives, read at once
    two = replace(DRIVE, piece_bytes=1)
    remember(settings, drive=(tmp_path, two), more=[tmp_path])
    assert remembered_drive(settings, tmp_path, tmp_path) == two
    assert remembered_drive(settings, tmp_path) == DRIVE
    assert remembered_ram(settings) == RAM
    assert RAM.best == ("2 threads", 2e10)
    path = tmp_path / "home" / "state" / "devices.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.linux("uses /dev/shm")
def test_another_drive_has_a_measurement_of_its_own(tmp_path: Path) -> None:
    settings, other = Settings(tmp_path / "home"), Path("/dev/shm")
    remember(settings, drive=(tmp_path, DRIVE))
    if not other.exists() or drive_key(other) == drive_key(tmp_path):
        pytest.skip("/dev/shm is no drive of its own")
    assert remembered_drive(settings, other) is None


@pytest.mark.parametrize(
    "change",
    [
        {"readers": 0},
        {"readers": 65},
        {"in_flight": 0},
        {"block_bytes": 5000},
        {"block_bytes": 0},
        {"bytes_per_s": 0},
        {"direct": None, "readers": "many"},
    ],
)
def test_a_note_that_makes_no_sense_is_no_note(tmp_path: Path, change: dict[str, object]) -> None:
    settings = Settings(tmp_path)
    remember(settings, drive=(tmp_path, DRIVE))
    path = tmp_path / "state" / "devices.json"
    state = json.loads(path.read_text())
    state["drives"][drive_key(tmp_path)]["reading"].update(change)
    path.write_text(json.dumps(state))
    assert remembered_drive(settings, tmp_path) is None
    path.write_text("nonsense")
    assert remembered_drive(settings, tmp_path) is None


def test_a_first_load_tries_the_drive_once(
    demo_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(tmp_path)
    manifest, folder = Library(Settings(demo_home)).read("demo")
    monkeypatch.setattr(measuring, "_QUICK_BYTES", 1 << 20)
    found = drive_of(settings, folder, manifest)
    assert found is not None
    assert not found.thorough
    assert remembered_drive(settings, folder) == found
    monkeypatch.setattr(measuring, "sweep", None)  # not measured again
    assert drive_of(settings, folder, manifest) == found


@pytest.mark.parametrize(
    ("change", "thorough", "seen", "kept"),
    [
        ({}, False, 2.5e9, True),
        ({}, False, 2.7e9, False),
        ({}, False, None, True),
        ({}, True, 2.7e9, True),
        ({"direct": False}, False, 2.7e9, True),  # of the page cache, not of the drive
    ],
)
def test_a_first_loads_figure_that_is_far_too_slow_is_forgotten(
    tmp_path: Path, change: dict[str, Any], thorough: bool, seen: float | None, kept: bool
) -> None:
    settings = Settings(tmp_path)
    drive = replace(DRIVE, reading=replace(READING, **change), thorough=thorough)
    remember(settings, ram=RAM, drive=(tmp_path, drive))
    check_drive(settings, tmp_path, drive, seen)
    assert remembered_drive(settings, tmp_path) == (drive if kept else None)
    assert remembered_ram(settings) == RAM
    remember(settings, drive=(tmp_path, DRIVE))
    forget_drive(settings, replace(DRIVE, piece_bytes=1), tmp_path)
    assert remembered_drive(settings, tmp_path) == DRIVE  # a newer measurement


def test_an_engine_forgets_a_drive_that_it_reads_faster(demo_home: Path, tmp_path: Path) -> None:
    settings = Settings(tmp_path)
    manifest, folder = Library(Settings(demo_home)).read("demo")
    slow = Drive(replace(READING, bytes_per_s=1.0), False, 4 << 20, DRIVE.measured_at)
    remember(settings, drive=(folder, slow))
    config = EngineConfig(memory=parse_memory("20%"))
    with Engine.open(manifest, folder, config, settings) as engine:
        engine.extend(engine.new_state(), list(b"17+25="))
        assert remembered_drive(settings, folder) == slow
    assert remembered_drive(settings, folder) is None


def test_an_engine_reads_as_was_measured(demo_home: Path, tmp_path: Path) -> None:
    settings = Settings(tmp_path)
    manifest, folder = Library(Settings(demo_home)).read("demo")
    assert drive_of(settings, folder, manifest) is None  # 9 MB are too few to measure a drive
    assert not (tmp_path / "state").exists()
    with Engine.open(manifest, folder, EngineConfig(), settings) as engine:
        assert any(f"{DEFAULT_READING.readers} readers" in note for note in engine.info.choices)
    remember(settings, ram=RAM, drive=(folder, DRIVE))
    with Engine.open(manifest, folder, EngineConfig(), settings) as engine:
        note = (
            "disk: 5 readers, past the page cache (by `moeinf devices`, 2026-01-02T03:04:05+00:00)"
        )
        assert note in engine.info.choices
    speeds = measure(settings, folder, manifest)
    assert (speeds.ram_bytes_per_s, speeds.disk_bytes_per_s) == (2e10, 2e9)
    assert "2 threads" in speeds.ram_provenance
