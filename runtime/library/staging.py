"""Make a model in a hidden folder beside its final folder, one process at a time.

The folder `.<tag>.partial` holds finished files, unfinished files, and a journal. A line of the
journal is appended only after its data is durable, so that a rerun can continue from it:

    {"making": {...}}     first line: source and tag; if they differ, the rerun starts over
    {"file": {...}}       a finished file, as the manifest will record it
    {"part": [file, n, crc]}  the n-th source tensor is in the unfinished `file`, with this CRC-32C
    {"done": name}        a source file is no longer needed
    {"broken": name}      a source tensor that has been written, with NaN or infinity in it
    {"rounded": name}     one whose integers were quantised again, because its scales do not fit

The bytes of a part may change before the rerun: shard_writer.py compares them with the CRC-32C.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from moeinf.errors import Conflict
from moeinf.offload.format.drives import (
    MissingDrive,
    check_unfinished,
    places,
    remove_folder,
)
from moeinf.offload.format.shards import FileRecord
from moeinf.runtime.files.atomic import make_folder_durably, sync_filesystem, write_all
from moeinf.runtime.files.regular import open_regular, read_regular
from moeinf.runtime.system import check_locks, lock

JOURNAL = "journal.jsonl"
DOWNLOADS = "source"
PARTIAL, OLD = ".partial", ".old"  # suffixes of the hidden folders beside a model's folder
_LEFTOVERS = (errno.ENOTEMPTY, errno.ENOENT)


class _Line(Struct):
    """A line of a journal. One field is set."""

    making: dict[str, Any] | None = None
    file: FileRecord | None = None
    part: tuple[str, int, int] | None = None
    done: str | None = None
    broken: str | None = None
    rounded: str | None = None


class PullInProgress(Conflict, RuntimeError):
    """Another process is writing the same model."""

    code = "pull_in_progress"
    hint = "the same command when that pull has ended"


class StagingFolder:
    """The folder and its journal. Not thread-safe."""

    def __init__(self, folder: Path, making: Mapping[str, object]) -> None:
        self.folder = folder
        self.files: dict[str, FileRecord] = {}
        self.parts: dict[tuple[str, int], int] = {}  # (file, number) -> CRC-32C
        self.done: set[str] = set()
        self.broken: list[str] = []
        self.rounded: list[str] = []
        self._pending: list[dict[str, object]] = []
        self._roots = [place.resolve() for place in places(folder)]
        if not self._resume(making):
            self._remove(keep_downloads=self._is_of_repository(making))
            self.files, self.parts, self.done = {}, {}, set()
            self.broken, self.rounded = [], []
            folder.mkdir(parents=True, exist_ok=True)
            self._pending.append({"making": dict(making)})
            self.commit()

    def add_file(self, record: FileRecord) -> None:
        """Record a finished file, effective from the next commit."""
        self.files[record.path] = record
        self._pending.append({"file": msgspec.structs.asdict(record)})

    def add_part(self, file: str, number: int, crc: int) -> None:
        """Record a part of an unfinished file, effective from the next commit."""
        self.parts[file, number] = crc
        self._pending.append({"part": [file, number, crc]})

    def add_done(self, source: str) -> None:
        """Record that a source file is no longer needed, effective from the next commit."""
        self.done.add(source)
        self._pending.append({"done": source})

    def add_broken(self, tensor: str) -> None:
        """Record a tensor with NaN or infinity, effective from the next commit."""
        if tensor not in self.broken:
            self.broken.append(tensor)
            self._pending.append({"broken": tensor})

    def add_rounded(self, tensor: str) -> None:
        """Record a tensor whose integers were not kept, effective from the next commit."""
        if tensor not in self.rounded:
            self.rounded.append(tensor)
            self._pending.append({"rounded": tensor})

    def commit(self) -> None:
        """Make all files in the folder durable, then append their journal lines durably."""
        if not self._pending:
            return
        for place in places(self.folder):
            sync_filesystem(place)
        text = "".join(json.dumps(line) + "\n" for line in self._pending)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        journal = open_regular(self.folder / JOURNAL, flags)
        try:
            write_all(journal, text.encode(), self.folder)
            os.fsync(journal)
        finally:
            os.close(journal)
        self._pending.clear()

    def _resume(self, making: Mapping[str, object]) -> bool:
        """Read the journal of an earlier attempt. Return False if it is absent or different.

        Raises MissingDrive.
        """
        try:
            lines = read_lines(self.folder / JOURNAL)
            if not lines or lines[0].making != dict(making):
                return False
            check_unfinished(self.folder, self.folder.parent.name)
            self._drop_torn_line()
            for line in lines[1:]:
                self._take_in(line)
            return all(self._take_back(file) for file in {file for file, _ in self.parts})
        except MissingDrive:
            raise
        except (ValueError, OSError):
            return False  # damaged: trust none of its lines

    def _drop_torn_line(self) -> None:
        """Cut what follows the journal's last whole line, so that the next line begins one."""
        data = read_regular(self.folder / JOURNAL)
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(self.folder / JOURNAL, whole)

    def _is_of_repository(self, making: Mapping[str, object]) -> bool:
        """Return whether an earlier attempt, with other values, used the same repository."""
        before: Mapping[str, Any] | None = None
        with suppress(ValueError):
            before = next(iter(read_lines(self.folder / JOURNAL, most=1)), _Line()).making
        places = [
            source.get("repository")
            for about in (making, before)
            if isinstance(about, Mapping) and isinstance(source := about.get("source"), Mapping)
        ]
        return len(places) == 2 and isinstance(places[0], str) and places[0] == places[1]

    def _remove(self, keep_downloads: bool) -> None:
        """Start over. Downloads may stay, since they are hashed before use."""
        if not keep_downloads:
            remove_folder(self.folder, ignore_errors=True)
            return
        for place in places(self.folder)[1:]:
            shutil.rmtree(place, ignore_errors=True)
        for path in self.folder.iterdir():
            if path.name == DOWNLOADS:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()

    def _take_in(self, line: _Line) -> None:
        """Apply one line of the journal. Raises ValueError if it is damaged."""
        if line.file is not None:
            path = self.folder / line.file.path
            if not any(map(path.resolve().is_relative_to, self._roots)):
                raise ValueError(f"{line.file.path!r} leaves the folder")
            if path.is_file() and path.stat().st_size == line.file.size_bytes:
                self.files[line.file.path] = line.file
        elif line.part is not None:
            file, number, crc = line.part
            self.parts[file, number] = crc
        elif line.done is not None:
            self.done.add(line.done)
        elif line.broken is not None:
            self.broken.append(line.broken)
        elif line.rounded is not None:
            self.rounded.append(line.rounded)

    def _take_back(self, file: str) -> bool:
        """Return whether the parts of `file` exist, after a rename to the unfinished name if due.

        A kill between the last rename and the journal leaves a finished file without its journal
        line. That file gets the name of an unfinished one again.
        """
        whole, unfinished = self.folder / file, unfinished_path(self.folder, file)
        if file not in self.files and not unfinished.exists() and whole.exists():
            whole.rename(unfinished)
        return file in self.files or unfinished.exists()


def read_lines(path: Path, most: int | None = None) -> list[_Line]:
    """Return the complete lines of a journal, up to the first torn one.

    Raises ValueError for a line with fields of other types.
    """
    lines: list[_Line] = []
    with suppress(OSError, RecursionError):
        for text in read_regular(path).split(b"\n")[:-1][:most]:
            try:
                lines.append(_LINE.decode(text))
            except msgspec.ValidationError:
                raise
            except msgspec.DecodeError:
                break
    return lines


def unfinished_path(folder: Path, file: str) -> Path:
    """Return the path of an unfinished file with parts from several source files."""
    return folder / f"{file}.parts"


def partial_folder(target: Path) -> Path:
    return target.with_name(f".{target.name}{PARTIAL}")


def old_folder(target: Path) -> Path:
    """Return the path to which a model is renamed before its deletion."""
    return target.with_name(f".{target.name}{OLD}")


def downloads_of(target: Path) -> Path:
    """Return the folder of the source files of an unfinished model."""
    return partial_folder(target) / DOWNLOADS


def taken_bytes(folder: Path) -> int:
    """Return the disk space of the files below a folder, in bytes. Files may vanish meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += 512 * Path(place, name).lstat().st_blocks
    return total


def taken_on_drives(folder: Path) -> int:
    """Return the disk space of a model's folder on all drives, in bytes."""
    return sum(map(taken_bytes, places(folder)))


@contextmanager
def staging_folder(
    target: Path, locks: Path, making: Mapping[str, object]
) -> Iterator[StagingFolder]:
    """Yield the staging folder for the model folder `target`. Its files stay after a failure.

    Raises PullInProgress if another process is making the model.
    """
    with only_maker(target, locks):
        # A replaced model that a killed process did not delete.
        remove_folder(old_folder(target), ignore_errors=True)
        yield StagingFolder(partial_folder(target), making)


@contextmanager
def only_maker(target: Path, locks: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock for making `target`.

    If another process holds it, wait with `wait`, else raise PullInProgress.
    """
    check_locks()
    make_folder_durably(locks)
    path = locks / f"pull-{target.parent.name}-{target.name}.lock"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        try:
            lock(descriptor, wait=wait)
        except BlockingIOError as error:
            name = f"{target.parent.name}:{target.name}"
            raise PullInProgress(f"another process is pulling {name}") from error
        yield
    finally:
        os.close(descriptor)


def discard(target: Path) -> None:
    """Remove the remains of unfinished work on a model, and its parent folder if empty."""
    for folder in (partial_folder(target), old_folder(target)):
        remove_folder(folder, ignore_errors=True)
    try:
        target.parent.rmdir()
    except OSError as error:
        if error.errno not in _LEFTOVERS:
            raise


# Made here, not at the first use: msgspec builds the tables of a type without a lock.
_LINE = msgspec.json.Decoder(_Line)
