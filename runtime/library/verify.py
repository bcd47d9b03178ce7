"""Check a model's files against its manifest, and repair damaged files from their source.

A repaired file must have the hash of the manifest.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from moeinf.errors import Failure, problem
from moeinf.models.families import family_of
from moeinf.offload.format.drives import bare, link_of, places
from moeinf.offload.format.shards import FileRecord, write_file
from moeinf.runtime.checkpoints.checkpoint import (
    BadCheckpoint,
    Checkpoint,
    SourceTensor,
)
from moeinf.runtime.checkpoints.inventory import Forms, take_inventory
from moeinf.runtime.checkpoints.quantised.fp8 import sources
from moeinf.runtime.files.atomic import sync_filesystem
from moeinf.runtime.files.regular import check_regular
from moeinf.runtime.library.library import NoSuchModel
from moeinf.runtime.library.manifest import MANIFEST, Manifest
from moeinf.runtime.library.repacking.repack import in_tag
from moeinf.runtime.library.repacking.shard_writer import all_targets, hash_file
from moeinf.runtime.names import bits_of_tag
from moeinf.runtime.sizes import Progress
from moeinf.runtime.text.tokenizer import TOKENIZER
from moeinf.runtime.text.tokenizer_trial import convert

_WORKERS = 2


class CannotRepair(Failure, RuntimeError):
    """The source of a model is gone, or has changed since the pull."""

    code = "cannot_repair"
    hint = "`moeinf rm MODEL`, then `moeinf pull MODEL`"


@dataclass(frozen=True)
class Damage:
    """One file that differs from the manifest, or is missing."""

    path: str
    problem: str


class RepairSource(Protocol):
    """A checkpoint that supplies single tensors and small files."""

    @property
    def checkpoint(self) -> Checkpoint:
        """The config and headers of the source."""
        ...

    def bring_tensors(self, tensors: list[SourceTensor]) -> None:
        """Make the bytes of these tensors readable at their paths."""
        ...

    def small_file(self, name: str) -> bytes:
        """Return a config, tokenizer or other small file.

        Raises OSError or BadCheckpoint if it is absent.
        """
        ...


@dataclass(frozen=True)
class LocalRepair:
    """A checkpoint folder of the user."""

    checkpoint: Checkpoint

    def bring_tensors(self, tensors: list[SourceTensor]) -> None:
        """Do nothing: the files are local."""

    def small_file(self, name: str) -> bytes:
        return self.checkpoint.need_small_file(name)


def verify(folder: Path, manifest: Manifest, progress: Progress) -> list[Damage]:
    """Hash every file again, and return those that are missing, truncated or changed.

    Raises NoSuchModel if the model was deleted meanwhile.
    """
    total, done = manifest.size_bytes, 0
    found: list[Damage] = []
    pool = ThreadPoolExecutor(_WORKERS)
    try:
        for record, damage in zip(
            manifest.files, pool.map(lambda r: _check(folder, r), manifest.files), strict=True
        ):
            if damage is not None:
                found.append(damage)
            done += record.size_bytes
            progress("verifying", done, total)
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C: do not hash the other files first
    if found and not os.path.lexists(folder / MANIFEST):
        raise NoSuchModel(str(manifest.model), [])
    return found


def _check(folder: Path, record: FileRecord) -> Damage | None:
    path = folder / record.path
    try:
        check_regular(path)
        if (size_bytes := path.stat().st_size) != record.size_bytes:
            return Damage(record.path, f"has {size_bytes} bytes instead of {record.size_bytes}")
        now = hash_file(path, record.path, record.data_offset)
    except FileNotFoundError:
        return Damage(record.path, "is missing")
    except OSError as error:
        return Damage(record.path, f"cannot be read: {problem(error)}")
    return None if now == record else Damage(record.path, "has different content")


def repair(
    folder: Path,
    manifest: Manifest,
    damages: list[Damage],
    source: RepairSource,
    progress: Progress,
) -> None:
    """Write the damaged files again. Raises CannotRepair, BadCheckpoint, DownloadFailed."""
    family, mtp = family_of(source.checkpoint.config), manifest.mtp is not None
    found = take_inventory(family, source.checkpoint, mtp)
    inventory, dtype = in_tag(found, manifest.tag)
    if bits_of_tag(manifest.tag) is not None:  # chosen once
        forms = Forms(manifest.forms, manifest.dense_forms)
        inventory = dataclasses.replace(inventory, forms=forms)
    targets = {target.name: target for target in all_targets(inventory, dtype)}
    for number, damage in enumerate(damages):
        target = targets.get(bare(damage.path))
        if target is None:
            data = _small_file(source, damage.path)
            if data is None and damage.path == TOKENIZER:  # it was converted from another file
                data = convert(lambda name: _small_file(source, name))
            if data is None:
                raise CannotRepair(f"the source no longer has {damage.path}")
            _replace(folder, manifest, damage.path, b"", [memoryview(data)])
        else:
            source.bring_tensors(sources(target.parts))
            parts = (block for n in range(len(target.parts)) for block in target.data(n))
            _replace(folder, manifest, damage.path, target.header, parts)
        progress("repairing", number + 1, len(damages))
    for place in places(folder):
        sync_filesystem(place)


def _small_file(source: RepairSource, name: str) -> bytes | None:
    try:
        return source.small_file(name)
    except (OSError, BadCheckpoint):
        return None


def _replace(
    folder: Path, manifest: Manifest, name: str, header: bytes, data: Iterable[memoryview]
) -> None:
    """Replace a damaged file. Raises CannotRepair if the new one differs from the manifest."""
    drive = folder / link_of(name)  # files move only within a drive
    aside, path = drive / ".repair", bare(name)
    try:
        record = replace(write_file(aside, path, header, data), path=name)
        if record != manifest.file(name):
            raise CannotRepair(
                f"the source of {manifest.model} has changed since the pull: {name} differs; "
                "pull the model again"
            )
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (aside / path).replace(folder / name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
