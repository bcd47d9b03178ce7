"""What was measured of this machine, remembered: $MOEINF_HOME/state/devices.json (0600).

    { "version": 1,
      "ram":    { "loops": { name: bytes per second }, "measured_at" },
      "drives": { key: { "reading": { readers, block_bytes, direct, bytes_per_s, in_flight },
                         "thorough": by `moeinf devices`, or in passing by a first load,
                         "piece_bytes", "measured_at", "notes" } },
      "gpus":   { name: { "contended": { what experts, how many threads:
                                           { bus_bytes_per_s, cpu_bytes_per_s } },
                          "bus_bytes_per_s", "bus_measured_at", "measured_at": of the last } } }

A drive's key is its file system's id, or its device number where there is no such id. Does not know
how anything is measured (drive, native read loop) nor what plans make of it.
"""

from __future__ import annotations

import datetime
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moeinf.native import MAX_READERS, PAGE_BYTES
from moeinf.offload.gpu_tier.miss_split import Contended
from moeinf.runtime.atomic_files import write_text_durably
from moeinf.runtime.config import Settings
from moeinf.runtime.machine.disk_bench import WHOLE_BLOCKS, Reading
from moeinf.runtime.names import MACHINE_STATE
from moeinf.runtime.regular_files import read_regular

_VERSION = 1
DEFAULT_READING = Reading(4, WHOLE_BLOCKS, direct=False, bytes_per_s=0.0, in_flight=4)


@dataclass(frozen=True)
class Drive:
    """How a drive is best read, as measured on `measured_at` with reads of piece_bytes."""

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

    loops: dict[str, float]
    measured_at: str

    @property
    def best(self) -> tuple[str, float]:
        return max(self.loops.items(), key=lambda item: item[1])


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def drive_key(folder: Path) -> str:
    """The drive that a folder lies on; of the nearest folder that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    file_system = os.statvfs(folder).f_fsid
    return f"fs-{file_system:x}" if file_system else f"device-{folder.stat().st_dev:x}"


def remembered_drive(settings: Settings, folder: Path) -> Drive | None:
    """None when this drive was never measured, or what is noted makes no sense."""
    with suppress(OSError, KeyError, TypeError, ValueError):
        entry = _read(settings)["drives"][drive_key(folder)]
        r = entry["reading"]
        reading = Reading(
            int(r["readers"]), int(r["block_bytes"]), bool(r["direct"]), float(r["bytes_per_s"]),
            int(r["in_flight"]),
        )  # fmt: skip
        blocks_fit = 0 < reading.block_bytes <= WHOLE_BLOCKS
        aligned = reading.block_bytes % PAGE_BYTES == 0
        if (
            1 <= reading.readers <= MAX_READERS
            and reading.in_flight >= 1
            and reading.bytes_per_s > 0
            and blocks_fit
            and aligned
        ):
            return Drive(
                reading,
                bool(entry["thorough"]),
                int(entry["piece_bytes"]),
                str(entry["measured_at"]),
                tuple(map(str, entry["notes"])),
            )
    return None


def remembered_ram(settings: Settings) -> Ram | None:
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        entry = _read(settings)["ram"]
        loops = {str(name): float(speed) for name, speed in entry["loops"].items()}
        if loops and min(loops.values()) > 0:
            return Ram(loops, str(entry["measured_at"]))
    return None


def remembered_contended(settings: Settings, gpu: str, what: str) -> Contended | None:
    """How fast bus and CPU were beside each other, for such experts and so many threads."""
    with suppress(KeyError, TypeError, ValueError):
        entry = _read(settings)["gpus"][gpu]["contended"][what]
        bus, cpu = float(entry["bus_bytes_per_s"]), float(entry["cpu_bytes_per_s"])
        if bus > 0 and cpu > 0:
            return Contended(bus, cpu)
    return None


def remembered_bus(settings: Settings, gpu: str) -> tuple[float, str] | None:
    """Bytes per second from host slots, and when that was measured."""
    with suppress(KeyError, TypeError, ValueError):
        entry = _read(settings)["gpus"][gpu]
        speed = float(entry["bus_bytes_per_s"])
        return (
            (speed, str(entry.get("bus_measured_at", entry["measured_at"]))) if speed > 0 else None
        )
    return None


def remember_gpu(
    settings: Settings,
    gpu: str,
    *,
    bus_bytes_per_s: float | None = None,
    contended: tuple[str, Contended] | None = None,
) -> None:
    """Notes what is given beside what is there; a failure to write is no failure."""
    state = _read(settings)
    gpus = state.get("gpus")
    state["gpus"] = gpus if isinstance(gpus, dict) else {}
    entry = state["gpus"].get(gpu)
    entry = state["gpus"][gpu] = entry if isinstance(entry, dict) else {}
    if bus_bytes_per_s is not None:
        entry["bus_bytes_per_s"], entry["bus_measured_at"] = bus_bytes_per_s, now()
    if contended is not None:
        forms = entry.get("contended")
        entry["contended"] = forms if isinstance(forms, dict) else {}
        entry["contended"][contended[0]] = asdict(contended[1])
    entry["measured_at"] = now()
    _write(settings, state)


def remember(
    settings: Settings, *, ram: Ram | None = None, drive: tuple[Path, Drive] | None = None
) -> None:
    """Notes what is given beside what is there; a failure to write is no failure."""
    state = _read(settings)
    if ram is not None:
        state["ram"] = asdict(ram)
    if drive is not None:
        drives = state.get("drives")
        state["drives"] = drives if isinstance(drives, dict) else {}
        state["drives"][drive_key(drive[0])] = asdict(drive[1])
    _write(settings, state)


def _write(settings: Settings, state: dict[str, Any]) -> None:
    state["version"] = _VERSION
    path = measured_path(settings)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_text_durably(path, json.dumps(state, indent=1), mode=0o600)


def _read(settings: Settings) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads(read_regular(measured_path(settings)))
        if isinstance(found, dict) and found.get("version") == _VERSION:
            return found
    return {}


def measured_path(settings: Settings) -> Path:
    """Return the file that remembers."""
    return settings.home / "state" / MACHINE_STATE
