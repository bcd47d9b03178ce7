"""Store measurements of this machine in $MOEINF_HOME/state/devices.json (0600).

    { "version": 1,
      "ram":    { "loops": { name: bytes per second }, "measured_at" },
      "drives": { key: { "reading": { readers, block_bytes, direct, bytes_per_s, in_flight },
                         "thorough": by `moeinf devices`, or in passing by a first load,
                         "piece_bytes", "measured_at", "notes" } },
      "gpus":   { name: { "contended": { what experts, how many threads:
                                           { bus_bytes_per_s, cpu_bytes_per_s } },
                          "bus_bytes_per_s", "bus_measured_at", "measured_at": of the last } } }

A drive's key is its file system's id, or its device number if there is no such id. Drives that are
read together have theirs, in the order of MOEINF_HOME.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from moeinf.offload.gpu_tier.miss_split import BytesPerSecond, Contended
from moeinf.runtime.config import Settings
from moeinf.runtime.files.state import (
    Entries,
    entries_of,
    entry_of,
    read_entries,
    write_entries,
)
from moeinf.runtime.machine.disk_bench import WHOLE_BLOCKS, Reading
from moeinf.runtime.names import MACHINE_STATE

_VERSION = 1
DEFAULT_READING = Reading(4, WHOLE_BLOCKS, direct=False, bytes_per_s=0.0, in_flight=4)


@dataclass(frozen=True)
class Drive:
    """The best way to read a drive, as measured on `measured_at` with reads of piece_bytes."""

    reading: Reading
    thorough: bool
    piece_bytes: int
    measured_at: str
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        way = "past the page cache" if self.reading.direct else "through the page cache"
        how = "`moeinf devices`" if self.thorough else "a first load"
        return f"{self.reading.readers} readers, {way} (by {how}, {self.measured_at})"


@dataclass(frozen=True)
class Ram:
    """Bytes per second of each named read loop; the best counts."""

    loops: Annotated[dict[str, BytesPerSecond], Meta(min_length=1)]
    measured_at: str

    @property
    def best(self) -> tuple[str, float]:
        return max(self.loops.items(), key=lambda item: item[1])


class _Bus(Struct):
    """A part of a GPU's entry."""

    bus_bytes_per_s: BytesPerSecond
    measured_at: str
    bus_measured_at: str | None = None


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def drive_key(*folders: Path) -> str:
    """Return the key of the drives of these folders, or of their nearest existing parents."""
    return " ".join(map(_drive_key, folders))


def _drive_key(folder: Path) -> str:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    file_system = os.statvfs(folder).f_fsid if hasattr(os, "statvfs") else 0
    return f"fs-{file_system:x}" if file_system else f"device-{folder.stat().st_dev:x}"


def remembered_drive(settings: Settings, *folders: Path) -> Drive | None:
    """Return the measurement of these drives; None if there is no entry or it is damaged."""
    with suppress(OSError):
        return entry_of(entries_of(_read(settings), "drives"), drive_key(*folders), _DRIVE)
    return None


def remembered_ram(settings: Settings) -> Ram | None:
    return entry_of(_read(settings), "ram", _RAM)


def remembered_contended(settings: Settings, gpu: str, what: str) -> Contended | None:
    """Return the contended speeds of bus and CPU for `what`: expert format and thread count."""
    entry = entries_of(entries_of(_read(settings), "gpus"), gpu)
    return entry_of(entries_of(entry, "contended"), what, _CONTENDED)


def remembered_bus(settings: Settings, gpu: str) -> tuple[float, str] | None:
    """Return bytes per second from host slots, and when it was measured; None if unknown."""
    found = entry_of(entries_of(_read(settings), "gpus"), gpu, _BUS)
    if found is None:
        return None
    return found.bus_bytes_per_s, found.bus_measured_at or found.measured_at


def remember_gpu(
    settings: Settings,
    gpu: str,
    *,
    bus_bytes_per_s: float | None = None,
    contended: tuple[str, Contended] | None = None,
) -> None:
    """Add GPU measurements to the file; keep the others. A failure to write is ignored."""
    state = _read(settings)
    gpus = entries_of(state, "gpus")
    entry = entries_of(gpus, gpu)
    if bus_bytes_per_s is not None:
        entry |= {"bus_bytes_per_s": bus_bytes_per_s, "bus_measured_at": now()}
    if contended is not None:
        what, speeds = contended
        entry["contended"] = {**entries_of(entry, "contended"), what: speeds}
    state["gpus"] = {**gpus, gpu: {**entry, "measured_at": now()}}
    _write(settings, state)


def remember(
    settings: Settings,
    *,
    ram: Ram | None = None,
    drive: tuple[Path, Drive] | None = None,
    more: Sequence[Path] = (),
) -> None:
    """Add measurements to the file; keep the others. A failure to write is ignored.

    more: folders of further drives that were read at the same time.
    """
    state = _read(settings)
    if ram is not None:
        state["ram"] = ram
    if drive is not None:
        folder, measured = drive
        state["drives"] = {**entries_of(state, "drives"), drive_key(folder, *more): measured}
    _write(settings, state)


def forget_drive(settings: Settings, drive: Drive, *folders: Path) -> None:
    """Remove the measurement of these drives, if it still is this one."""
    if remembered_drive(settings, *folders) == drive:
        state = _read(settings)
        drives = entries_of(state, "drives")
        del drives[drive_key(*folders)]
        _write(settings, {**state, "drives": drives})


def _write(settings: Settings, state: Entries) -> None:
    write_entries(measured_path(settings), {**state, "version": _VERSION})


def _read(settings: Settings) -> Entries:
    found = read_entries(measured_path(settings))
    return found if entry_of(found, "version", _NUMBER) == _VERSION else {}


def measured_path(settings: Settings) -> Path:
    """Return the path of the file."""
    return settings.home / "state" / MACHINE_STATE


# Made here, not at the first use: msgspec builds the tables of a type without a lock.
_DRIVE, _RAM = msgspec.json.Decoder(Drive), msgspec.json.Decoder(Ram)
_CONTENDED, _BUS = msgspec.json.Decoder(Contended), msgspec.json.Decoder(_Bus)
_NUMBER = msgspec.json.Decoder(int)
