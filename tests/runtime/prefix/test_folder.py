"""Files of the prefix cache: damaged, foreign, unfinished, and a disk that is full."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moeinf.runtime.config import PREFILL_CHUNK
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.prefix import folder as files
from tests.runtime.prefix.conftest import OpenHere
from tests.runtime.prefix.test_cache import OTHER, SYSTEM, asked, stayed

_HEADER = 8192


@pytest.fixture
def written(open_here: OpenHere, folder: Path) -> list[Path]:
    """Return the files of one request, the one with its first tokens at first."""
    engine = open_here()
    asked(engine, SYSTEM)
    engine.close()
    return sorted(folder.iterdir(), key=lambda path: -path.stat().st_size)


def change(path: Path, at: int, byte: int | None = None) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)[0]
        file.seek(at)
        file.write(bytes([old ^ 1 if byte is None else byte]))


@pytest.mark.parametrize(
    ("damage", "left"),
    [
        (lambda path: change(path, 0), 0),  # the magic
        (lambda path: change(path, 8, 9), 0),  # the version
        (lambda path: change(path, 12, 255), 0),  # the header's length
        (lambda path: change(path, 40), 0),  # the header
        (lambda path: change(path, _HEADER + 7), 0),  # the bytes
        (lambda path: os.truncate(path, path.stat().st_size - 1), 0),
        (lambda path: os.truncate(path, 100), 0),
        (lambda path: os.truncate(path, 0), 0),
        (lambda path: path.unlink(), 0),
        (lambda path: path.rename(path.with_name("0" * 32 + ".kv")), 0),
        (lambda path: (path.unlink(), path.mkdir()), 0),
        (lambda path: (path.unlink(), os.mkfifo(path)), 0),
        (lambda path: (path.with_name("ab.kv")).write_bytes(b"x"), 445),
    ],
)
def test_a_damaged_file_is_never_used(
    damage: object, left: int, written: list[Path], open_here: OpenHere
) -> None:
    """The request is computed; the answer is that of an engine without a cache."""
    damage(written[0])  # type: ignore[operator]
    engine = open_here()
    again = asked(engine, SYSTEM)
    assert again.cached_tokens == left
    alone = open_here(prefix=None)
    expected = stayed(alone, SYSTEM) if left else asked(alone, SYSTEM).token_ids
    assert again.token_ids == expected


def test_only_the_part_after_a_damage_is_computed(written: list[Path], open_here: OpenHere) -> None:
    change(written[1], _HEADER + 7)
    engine = open_here()
    assert asked(engine, SYSTEM).cached_tokens == PREFILL_CHUNK
    notes = [note for note in engine.take_notes() if note.startswith("prefix cache:")]
    assert len(notes) == 1
    assert asked(engine, SYSTEM).cached_tokens == len(SYSTEM) - 1  # kept again


def test_files_that_another_process_removes(
    written: list[Path], open_here: OpenHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that vanishes between the list of the folder and a look at it is no error."""
    listed = files.PrefixFolder._entries

    def vanishing(of: files.PrefixFolder) -> list[os.DirEntry[str]]:
        found = listed(of)
        written[1].unlink(missing_ok=True)
        return found

    monkeypatch.setattr(files.PrefixFolder, "_entries", vanishing)
    engine = open_here()
    assert asked(engine, SYSTEM).cached_tokens == PREFILL_CHUNK
    engine.close()
    assert len(list(written[0].parent.glob("*.kv"))) == 2  # the other one is written again
    assert [note for note in engine.take_notes() if "cannot be written" in note] == []


def test_a_full_disk(open_here: OpenHere, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left on disk, a note reports it, and the RAM serves."""

    def full(descriptor: int, view: memoryview) -> None:
        os.write(descriptor, view[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_all", full)
    engine = open_here()
    asked(engine, SYSTEM)
    until = time.monotonic() + 20
    notes: list[str] = []
    while not notes and time.monotonic() < until:
        notes = [note for note in engine.take_notes() if "cannot be written" in note]
    assert len(notes) == 1
    assert asked(engine, SYSTEM).cached_tokens == len(SYSTEM) - 1
    engine.close()
    assert not list(folder.iterdir())


def test_a_drive_without_room_is_left_alone(
    open_here: OpenHere, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_SPARE_BYTES", 1 << 60)
    engine = open_here()
    asked(engine, SYSTEM)
    engine.close()
    assert not folder.exists()


def test_no_file_leaves_for_one_that_finds_no_room(
    written: list[Path], open_here: OpenHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_SPARE_BYTES", 1 << 60)
    engine = open_here()
    asked(engine, OTHER)
    engine.close()
    assert [path for path in written if not path.exists()] == []


_KILLED = """
import sys
from pathlib import Path
from moeinf.runtime.config import EngineConfig, PrefixBudget, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.library.library import Library
from moeinf.runtime.prefix import folder as files
from moeinf.runtime.sizes import parse_memory
import os, signal
from tests.runtime.prefix.test_cache import SYSTEM, asked
left, write = int(sys.argv[2]), files.write_all
def killing(descriptor, view):
    global left
    left -= 1
    if left < 0:
        os.write(descriptor, view[:len(view) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    write(descriptor, view)
files.write_all = killing
settings = Settings(Path(sys.argv[1]))
manifest, folder = Library(settings).read("demo:bf16")
config = EngineConfig(memory=parse_memory("100%"), prefix=PrefixBudget(64 << 20))
with Engine.open(manifest, folder, config, settings) as engine:
    asked(engine, SYSTEM)
"""


@pytest.mark.full
@pytest.mark.parametrize("writes", [0, 1, 2, 3])
def test_killed_while_it_writes(writes: int, home: Path, folder: Path, open_here: OpenHere) -> None:
    """The files that have their names are whole; an unfinished one is removed."""
    done = subprocess.run([sys.executable, "-c", _KILLED, str(home), str(writes)], timeout=120)
    assert done.returncode == -signal.SIGKILL
    whole = len(list(folder.glob("*.kv")))
    assert whole == writes // 2
    assert len(list(folder.glob(".*.partial"))) == 1
    engine: Engine = open_here()
    assert not list(folder.glob(".*"))
    cached = asked(engine, SYSTEM).cached_tokens
    assert cached == whole * PREFILL_CHUNK
