"""The least time for RAM and drive at once, and how their speeds are measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import at_once
from benchmarks.at_once import AtOnce, measure_at_once
from moeinf.runtime.machine import disk_bench
from moeinf.runtime.machine.disk_bench import FileRange

SPEEDS = AtOnce(ram_alone=30.0, drive_alone=2.0, ram=20.0, drive=1.0)


@pytest.mark.parametrize(
    ("ram", "drive", "seconds"),
    [
        (20.0, 1.0, 1.0),  # both end together
        (20.0, 2.0, 1.5),  # a second for both, and the rest of the drive's alone
        (50.0, 1.0, 2.0),  # the rest of RAM alone
        (60.0, 0.0, 2.0),  # each alone
        (0.0, 4.0, 2.0),
    ],
)
def test_what_is_left_of_one_has_its_speed_alone(ram: float, drive: float, seconds: float) -> None:
    assert SPEEDS.seconds(ram, drive) == pytest.approx(seconds)


def test_the_drive_is_read_while_ram_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, size = tmp_path / "pieces", 64 << 10
    path.write_bytes(bytes(8 * size))
    pieces = [FileRange(path, number * size, size) for number in range(8)]
    reads, during = 0, 0
    read_once = disk_bench.read_once

    def counted(*of: object) -> float | None:
        nonlocal reads
        reads += 1
        return read_once(*of)  # type: ignore[arg-type]

    def ram(*_: object) -> float:
        nonlocal during
        before = reads
        while reads < before + 3:
            pass
        during = reads - before
        return 5.0

    monkeypatch.setattr(at_once, "read_once", counted)
    monkeypatch.setattr(at_once, "read_bandwidth", ram)
    monkeypatch.setattr(at_once, "read_ceiling", lambda threads: 7.0 * threads)
    found = measure_at_once(pieces, threads=2, in_flight=2)
    assert during >= 3
    assert (found.ram, found.ram_alone) == (5.0, 14.0)
    assert min(found.drive, found.drive_alone) > 0
