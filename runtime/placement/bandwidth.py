"""Measure how fast this machine reads RAM and a drive and multiplies, or return remembered figures.

`moeinf devices` measures thoroughly. A first load or a plan reads some of the model's own shards,
in well under a second, for an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from moeinf.native import read_bandwidth
from moeinf.native._native import _measure_products
from moeinf.offload.format.drives import link_of, places
from moeinf.offload.format.shards import FileRecord
from moeinf.runtime.config import Settings
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.machine.disk_bench import FileRange, Progress, Sweep, sweep, written_files
from moeinf.runtime.machine.measurements import (
    Drive,
    Ram,
    forget_drive,
    now,
    remember,
    remembered_drive,
    remembered_ram,
)
from moeinf.runtime.machine.memory import core_count
from moeinf.runtime.sizes import format_bytes
from moeinf.runtime.system import Unsupported

_RAM_BYTES = 256 << 20  # far above any cache
_RAM_ROUNDS = 8
_QUICK_BYTES = 64 << 20  # a smaller sample gives no figure for the drive
_QUICK_IN_FLIGHT = (2, 8)
_QUICK_PIECE_BYTES = 4 << 20  # at most, so that the buffers stay within a load's scratch
_NOW_ROUNDS = 3
_FASTER = 1.3  # times the drive's speed, by one reader alone: that figure was of a busy moment
_FLOAT32_PATH = "avx512"  # or the best slower one: float32 products
_PRODUCT_ROUNDS = 3


@dataclass(frozen=True)
class Speeds:
    """Bytes per second of each tier, and the provenance of each figure.

    disk_bytes_per_s   infinite if the drive could not be measured
    products_per_s     float32 products of all threads; None if it was not measured
    has_amx            the processor multiplies bfloat16 in tiles
    """

    ram_bytes_per_s: float
    disk_bytes_per_s: float
    ram_provenance: str
    disk_provenance: str
    products_per_s: float | None = None
    has_amx: bool = False


def measure_ram(progress: Progress) -> Ram:
    """Measure six read loops: 1 thread or all; each plain, with prefetch, or on huge pages, too."""
    cores = core_count()
    variants = [("", False, False), (", prefetch", True, False)]
    variants.append((", prefetch, huge pages", True, True))
    loops: dict[str, float] = {}
    plans = [(n, *variant) for n in (1, cores) for variant in variants]
    for number, (threads, suffix, prefetch, huge) in enumerate(plans, 1):
        name = ("1 thread" if number <= len(variants) else f"{cores} threads") + suffix
        speed = read_bandwidth(_RAM_BYTES, threads, prefetch, huge, _RAM_ROUNDS)
        loops[name] = max(speed, loops.get(name, 0.0))
        progress(number * _RAM_BYTES * _RAM_ROUNDS, len(plans) * _RAM_BYTES * _RAM_ROUNDS)
    return Ram(loops, now())


def drive_of(settings: Settings, folder: Path, manifest: Manifest) -> Drive | None:
    """Return how to read this model's drive: remembered, or measured on its shards and remembered.

    Return None if its shards are too small to tell; otherwise read some 256 MiB of them.
    """
    first, *more = places(folder)
    known = remembered_drive(settings, first, *more)
    if known is not None:
        return known
    pieces = some_shards(folder, manifest)
    if sum(piece.size_bytes for piece in pieces) < _QUICK_BYTES:
        return None
    with suppress(OSError):  # the loader reports a missing shard
        drive = _quick_drive(pieces)
        remember(settings, drive=(first, drive), more=more)
        return drive
    return None


def check_drive(
    settings: Settings, folder: Path, drive: Drive, call_bytes_per_s: float | None
) -> None:
    """Forget a first load's measurement that is far too slow, so that the next load measures again.

    call_bytes_per_s: of single reads since the load; None if there were too few.
    """
    if drive.thorough or not drive.reading.direct or call_bytes_per_s is None:
        return
    if call_bytes_per_s > _FASTER * drive.reading.bytes_per_s:
        with suppress(OSError):  # the model may be gone
            forget_drive(settings, drive, *places(folder))


def drive_now(folder: Path, manifest: Manifest) -> float:
    """Return bytes per second of random reads of the model's shards, measured now.

    It reads at most some 800 MiB. Earlier measurements are neither used nor replaced. Raises
    OSError, and Unsupported where the system cannot read so.
    """
    pieces = some_shards(folder, manifest)
    swept = sweep(pieces, lambda *_: None, _QUICK_IN_FLIGHT, _NOW_ROUNDS, blocks=())
    return swept.chosen.bytes_per_s


def drive_at(settings: Settings, folder: Path) -> Drive:
    """Return how to read a folder's drive, and those of further homes at the same time.

    It is remembered, or measured on 64 MiB of temporary files. Raises OSError, for example if the
    disk is full.
    """
    more = settings.more_homes
    known = remembered_drive(settings, folder, *more)
    if known is None:
        count = _QUICK_BYTES // _QUICK_PIECE_BYTES
        with written_files((folder, *more), _QUICK_PIECE_BYTES, count, lambda *_: None) as pieces:
            known = _quick_drive(pieces)
        remember(settings, drive=(folder, known), more=more)
    return known


def measure(settings: Settings, folder: Path, manifest: Manifest) -> Speeds:
    """Return the speeds of RAM and of the model's drive for a plan.

    Without the model's files (a manifest alone) this is the drive of `folder`.
    """
    ram = remembered_ram(settings)
    if ram is not None:
        name, ram_speed = ram.best
        ram_how = f"`moeinf devices`, {ram.measured_at}: {name}"
    else:
        cores = core_count()
        ram_speed = read_bandwidth(_RAM_BYTES, cores, True, True, 3)
        ram_how = f"measured now: read loop over {_RAM_BYTES >> 20} MiB on {cores} threads"
    try:
        here = bool(manifest.files)
        drive = drive_of(settings, folder, manifest) if here else drive_at(settings, folder)
        small = drive is None
        if drive is None:  # a small model: use its own shards
            drive = _quick_drive(some_shards(folder, manifest))
    except (OSError, Unsupported) as error:  # for example if the disk is full
        why = getattr(error, "strerror", None) or error
        return Speeds(ram_speed, math.inf, ram_how, f"not measured: {why}")
    if small:
        size = sum(piece.size_bytes for piece in some_shards(folder, manifest))
        disk_how = f"measured now: only {format_bytes(size)} of expert shards; "
        disk_how += "`moeinf devices` measures the drive"
    else:
        disk_how = str(drive)
    return Speeds(ram_speed, drive.reading.bytes_per_s, ram_how, disk_how)


def with_products(speeds: Speeds) -> Speeds:
    """Measure how many float32 products all cores compute per second, in some 10 ms."""
    best = max(_measure_products(_FLOAT32_PATH) for _ in range(_PRODUCT_ROUNDS))
    return replace(speeds, products_per_s=best, has_amx=_has_amx())


def _has_amx() -> bool:
    with suppress(OSError):
        return " amx_bf16" in Path("/proc/cpuinfo").read_text()
    return False


def thorough_drive(swept: Sweep, piece_bytes: int) -> Drive:
    """Return the entry that `moeinf devices` stored for a sweep."""
    return Drive(swept.chosen, True, piece_bytes, now(), swept.notes)


def _quick_drive(pieces: Sequence[FileRange]) -> Drive:
    swept = sweep(pieces, lambda *_: None, _QUICK_IN_FLIGHT, rounds=1, blocks=())
    return Drive(swept.chosen, False, max(p.size_bytes for p in pieces), now(), swept.notes)


def some_shards(folder: Path, manifest: Manifest) -> list[FileRange]:
    """Choose pieces from shards all over the model, some 64 MiB, or all of a smaller model.

    They are on all of its drives.
    """
    drives: dict[str, list[FileRecord]] = {}
    for shard in manifest.shards():
        drives.setdefault(link_of(shard.path), []).append(shard)
    piece_bytes = min(_QUICK_PIECE_BYTES, manifest.slots.slot_bytes)
    chosen = list[FileRecord]()
    for shards in drives.values():
        count = max(1, min(len(shards), -(-_QUICK_BYTES // piece_bytes // len(drives))))
        chosen += shards[:: len(shards) // count][:count]
    return [
        FileRange(folder / s.path, s.data_offset, min(_QUICK_PIECE_BYTES, s.data_bytes))
        for s in chosen
    ]
