"""Where a model is being made: a hidden folder beside its final place, with one maker at a time.

Does not know what is being made. The folder `.<tag>.partial` holds finished files, what is still on
its way, and a journal whose lines are appended only after what they say is durable, so that a rerun
can go on from them:

    {"making": {...}}     first line: what of, as what; another making starts from nothing
    {"file": {...}}       a finished file, as the manifest will record it
    {"part": [file, n, crc]}  the n-th source tensor is in the unfinished `file`, with this CRC-32C
    {"done": name}        a source file is no longer needed
    {"broken": name}      a source tensor that has been written, with NaN or infinity in it

The bytes of a part may change before the rerun: shard_writer.py compares them with the CRC-32C.
"""

from __future__ import annotations

import errno
import fcntl
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
from moeinf.offload.format.shards import FileRecord
from moeinf.runtime.atomic_files import sync_filesystem
from moeinf.runtime.regular_files import open_regular, read_regular

JOURNAL = "journal.jsonl"
DOWNLOADS = "source"
PARTIAL, OLD = ".partial", ".old"  # ends of the hidden folders beside a model's
_LEFTOVERS = (errno.ENOTEMPTY, errno.ENOENT)


class _Line(Struct):
    """A line of a journal: one of its fields."""

    making: dict[str, Any] | None = None
    file: FileRecord | None = None
    part: tuple[str, int, int] | None = None
    done: str | None = None
    broken: str | None = None


class PullInProgress(Conflict, RuntimeError):
    """Another process writes the same model."""

    code = "pull_in_progress"
    hint = "the same again when that pull has ended"


class Workplace:
    """The folder and its journal. Used by one thread."""

    def __init__(self, folder: Path, making: Mapping[str, object]) -> None:
        self.folder = folder
        self.files: dict[str, FileRecord] = {}
        self.parts: dict[tuple[str, int], int] = {}  # with their CRC-32C
        self.done: set[str] = set()
        self.broken: list[str] = []
        self._pending: list[dict[str, object]] = []
        if not self._resume(making):
            self._remove(keep_downloads=self._is_of_repository(making))
            self.files, self.parts, self.done, self.broken = {}, {}, set(), []
            folder.mkdir(parents=True, exist_ok=True)
            self._pending.append({"making": dict(making)})
            self.commit()

    def add_file(self, record: FileRecord) -> None:
        """Notes a finished file; counts from the next commit on."""
        self.files[record.path] = record
        self._pending.append({"file": msgspec.structs.asdict(record)})

    def add_part(self, file: str, number: int, crc: int) -> None:
        """Notes a part of an unfinished file; counts from the next commit on."""
        self.parts[file, number] = crc
        self._pending.append({"part": [file, number, crc]})

    def add_done(self, source: str) -> None:
        """Notes that a source file may go; counts from the next commit on."""
        self.done.add(source)
        self._pending.append({"done": source})

    def add_broken(self, tensor: str) -> None:
        """Notes a tensor that is not finite; counts from the next commit on."""
        if tensor not in self.broken:
            self.broken.append(tensor)
            self._pending.append({"broken": tensor})

    def commit(self) -> None:
        """Makes everything in the folder durable, and then the lines that say so."""
        if not self._pending:
            return
        sync_filesystem(self.folder)
        text = "".join(json.dumps(line) + "\n" for line in self._pending)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        journal = open_regular(self.folder / JOURNAL, flags)
        try:
            os.write(journal, text.encode())
            os.fsync(journal)
        finally:
            os.close(journal)
        self._pending.clear()

    def _resume(self, making: Mapping[str, object]) -> bool:
        """Reads the journal of an earlier attempt; False when there is none that fits."""
        try:
            lines = _read_lines(self.folder / JOURNAL)
            if not lines or lines[0].making != dict(making):
                return False
            for line in lines[1:]:
                self._take_in(line)
            return all(self._take_back(file) for file in {file for file, _ in self.parts})
        except (ValueError, OSError):
            return False  # damaged, so that nothing in it is to be believed

    def _is_of_repository(self, making: Mapping[str, object]) -> bool:
        """Whether an earlier attempt at another making has fetched from the same repository."""
        before: Mapping[str, Any] | None = None
        with suppress(ValueError):
            before = next(iter(_read_lines(self.folder / JOURNAL, most=1)), _Line()).making
        places = [
            source.get("repository")
            for about in (making, before)
            if isinstance(about, Mapping) and isinstance(source := about.get("source"), Mapping)
        ]
        return len(places) == 2 and isinstance(places[0], str) and places[0] == places[1]

    def _remove(self, keep_downloads: bool) -> None:
        """Start again. What was fetched may stay: it is hashed before it is used."""
        if not keep_downloads:
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        for path in self.folder.iterdir():
            if path.name == DOWNLOADS:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()

    def _take_in(self, line: _Line) -> None:
        """Apply one line of the journal. Raises ValueError for a damaged one."""
        if line.file is not None:
            path = self.folder / line.file.path
            if not path.resolve().is_relative_to(self.folder.resolve()):
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

    def _take_back(self, file: str) -> bool:
        """Whether the parts of `file` are here, under the name that an unfinished file has.

        A kill between the last rename and the journal leaves the finished file under its own name
        without a line that says so: it is unfinished again.
        """
        whole, unfinished = self.folder / file, unfinished_path(self.folder, file)
        if file not in self.files and not unfinished.exists() and whole.exists():
            whole.rename(unfinished)
        return file in self.files or unfinished.exists()


def _read_lines(path: Path, most: int | None = None) -> list[_Line]:
    """Return the whole lines of a journal, without a torn one and what follows it.

    Raises ValueError for a line with other fields than ours.
    """
    lines: list[_Line] = []
    decoder = msgspec.json.Decoder(_Line)
    with suppress(OSError, RecursionError):
        for text in read_regular(path).splitlines()[:most]:
            try:
                lines.append(decoder.decode(text))
            except msgspec.ValidationError:
                raise
            except msgspec.DecodeError:
                break
    return lines


def unfinished_path(folder: Path, file: str) -> Path:
    """Where a file grows that takes its parts from several source files."""
    return folder / f"{file}.parts"


def partial_folder(target: Path) -> Path:
    return target.with_name(f".{target.name}{PARTIAL}")


def old_folder(target: Path) -> Path:
    """Where a model is put aside that is to go away, so that it is gone at once."""
    return target.with_name(f".{target.name}{OLD}")


def downloads_of(target: Path) -> Path:
    """Where the source files of an unfinished model lie."""
    return partial_folder(target) / DOWNLOADS


def taken_bytes(folder: Path) -> int:
    """What the files below a folder take up on the disk; they may come and go meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += 512 * Path(place, name).lstat().st_blocks
    return total


@contextmanager
def workplace(target: Path, locks: Path, making: Mapping[str, object]) -> Iterator[Workplace]:
    """The workplace for the model folder `target`. What is in it stays when the making fails.

    Raises PullInProgress when another process is at it.
    """
    with only_maker(target, locks):
        # An older model that was put aside, by a process that died before it could delete it.
        shutil.rmtree(old_folder(target), ignore_errors=True)
        yield Workplace(partial_folder(target), making)


@contextmanager
def only_maker(target: Path, locks: Path, *, wait: bool = False) -> Iterator[None]:
    """Holds the lock on making `target`. Raises PullInProgress when another process holds it."""
    locks.mkdir(parents=True, exist_ok=True)
    path = locks / f"pull-{target.parent.name}-{target.name}.lock"
    lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            name = f"{target.parent.name}:{target.name}"
            raise PullInProgress(f"another process is pulling {name}") from error
        yield
    finally:
        os.close(lock)


def discard(target: Path) -> None:
    """Removes what an unfinished making or removal has left, and empty folders above it."""
    for folder in (partial_folder(target), old_folder(target)):
        shutil.rmtree(folder, ignore_errors=True)
    try:
        target.parent.rmdir()
    except OSError as error:
        if error.errno not in _LEFTOVERS:
            raise
