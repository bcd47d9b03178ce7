"""The log that several processes append to: killed at every call, damaged at every byte."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moeinf.runtime.eamc.append_log import RecordLog

HEADER = b'{"kind": "test"}'
RECORDS = [b"first", b"second" * 100, b"x"]


class Place:
    """A log in its own folder, with its notes."""

    def __init__(self, folder: Path, header: bytes = HEADER) -> None:
        self.folder = folder
        self.notes: list[str] = []
        self.header = header

    @property
    def path(self) -> Path:
        return self.folder / "x.log"

    def open(self) -> RecordLog:
        def accepts(header: bytes) -> str | None:
            return None if header == self.header else "is of another kind"

        return RecordLog(self.folder, "x.log", self.header, accepts, self.notes.append)

    def aside(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path != self.path)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "state")


def filled(place: Place) -> RecordLog:
    log = place.open()
    for record in RECORDS:
        log.append(record)
    return log


def test_a_log_that_was_written_anew_under_the_same_inode(place: Place, tmp_path: Path) -> None:
    """A file system reuses the inode number of a deleted file."""
    log = filled(place)
    other = Place(tmp_path / "other")
    for number in range(9):
        other.open().append(b"another" * (90 + number))
    place.path.write_bytes(other.path.read_bytes())
    assert log.append(b"mine") == 10
    assert log.read() == [*other.open().read(), b"mine"]
    assert (place.notes, place.aside()) == ([], [])


def test_what_is_appended_is_read(place: Place) -> None:
    log = place.open()
    assert log.read() == []
    assert not place.folder.exists()
    assert [log.append(record) for record in RECORDS] == [1, 2, 3]
    assert log.read() == place.open().read() == RECORDS
    assert stat.S_IMODE(place.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(place.folder.stat().st_mode) == 0o700
    assert place.notes == []
    assert place.aside() == []


def test_two_logs_on_one_file_see_each_other(place: Place) -> None:
    one, two = place.open(), place.open()
    assert (one.append(b"a"), two.append(b"b"), one.append(b"c")) == (1, 2, 3)
    assert two.read() == [b"a", b"b", b"c"]
    assert one.rewrite(lambda records: records[1:]) == 2
    assert (two.append(b"d"), two.read()) == (3, [b"b", b"c", b"d"])
    assert one.rewrite(lambda _: []) == 0
    assert two.append(b"e") == 1


@pytest.mark.parametrize("cut", range(1, 14))
def test_an_end_that_was_never_finished(place: Place, cut: int) -> None:
    """The last record is 8 + 1 bytes; longer cuts reach into the record before."""
    filled(place)
    raw = place.path.read_bytes()
    place.path.write_bytes(raw[:-cut])
    whole = RECORDS[:2] if cut <= 9 else RECORDS[:1]
    assert place.open().append(b"new") == len(whole) + 1
    assert place.open().read() == [*whole, b"new"]
    if cut == 9:
        assert (place.notes, place.aside()) == ([], [])
    else:
        (note,) = place.notes
        assert f"the {len(whole)} whole entries before are kept" in note
        (aside,) = place.aside()
        rest = (place.folder / aside).read_bytes()
        assert raw[:-cut].endswith(rest)


def test_damage_at_any_byte_loses_nothing_silently(place: Place) -> None:
    filled(place)
    raw = place.path.read_bytes()
    place.path.unlink()
    header = 8 + 8 + len(HEADER)
    second = header + 8 + len(RECORDS[0])
    for at in [*range(second + 20), len(raw) - 1]:
        here = Place(place.folder / str(at))
        here.folder.mkdir()
        damaged = bytearray(raw)
        damaged[at] ^= 0x41
        here.path.write_bytes(damaged)
        found = here.open().read()
        assert found == RECORDS[: len(found)]
        (note,) = here.notes
        assert "\n" not in note
        if at < header:
            assert (found, here.aside()) == ([], ["x.log.aside-1"])
            assert (here.folder / "x.log.aside-1").read_bytes() == damaged
        else:
            kept = here.path.read_bytes() + (here.folder / "x.log.aside-1").read_bytes()
            assert kept == damaged
        assert here.open().append(b"more") == len(found) + 1


@pytest.mark.parametrize(
    "content", [b"not a log", b"MOEINFL\n", b"MOEINFL\n\xff\xff\xff\xff....", b"\0" * 4096]
)
def test_a_foreign_file_is_put_aside(place: Place, content: bytes) -> None:
    place.folder.mkdir()
    place.path.write_bytes(content)
    assert place.open().append(b"a") == 1
    if content == b"MOEINFL\n":  # the file after a process that died at once
        assert place.notes == []
        return
    assert (place.folder / "x.log.aside-1").read_bytes() == content
    assert "was put aside as x.log.aside-1" in place.notes[0]
    place.path.write_bytes(b"again")
    assert place.open().read() == []
    assert place.aside() == ["x.log.aside-1", "x.log.aside-2"]


def test_another_header_is_put_aside(place: Place) -> None:
    filled(place)
    other = Place(place.folder, b'{"kind": "other"}')
    assert other.open().read() == []
    assert "is of another kind" in other.notes[0]
    assert place.folder.joinpath("x.log.aside-1").exists()


def test_a_link_is_not_followed(place: Place, tmp_path: Path) -> None:
    place.folder.mkdir()
    place.path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        place.open().append(b"a")
    assert not (tmp_path / "elsewhere").exists()


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked child; return the signal that ended it, or 0."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("job", ["first", "append", "rewrite"])
def test_kill_at_every_call(job: str, tmp_path: Path) -> None:
    """Half of a write succeeds before its process dies; the log keeps whole records only."""

    def work(place: Place, at: int) -> None:
        count = 0

        def deadly(call: Callable[..., Any], writes: bool) -> Callable[..., Any]:
            def wrapped(*arguments: Any, **options: Any) -> Any:
                nonlocal count
                count += 1
                if count == at:
                    if writes:
                        call(arguments[0], arguments[1][: len(arguments[1]) // 2], *arguments[2:])
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*arguments, **options)

            return wrapped

        for name in ("pwrite", "fsync", "ftruncate", "rename", "replace", "open", "mkdir"):
            setattr(os, name, deadly(getattr(os, name), name == "pwrite"))
        log = place.open()
        if job == "rewrite":
            log.rewrite(lambda records: [*records[1:], b"new"])
        else:
            log.append(b"new")

    before = [] if job == "first" else RECORDS
    after = [*RECORDS[1:], b"new"] if job == "rewrite" else [*before, b"new"]
    outcomes = []
    for at in range(1, 60):
        place = Place(tmp_path / str(at))
        if before:
            filled(place)
        alive = in_child(lambda place=place, at=at: work(place, at)) == 0  # type: ignore[misc]
        found = place.open().read()
        outcomes.append(found)
        assert found in (before, after)
        assert [note for note in place.notes if "half written" not in note] == []
        assert place.open().append(b"next") == len(found) + 1
        if alive:
            break
    assert len(outcomes) >= 5
    assert outcomes[0] == before
    assert outcomes[-2:] == [after, after]


def test_processes_at_once_lose_nothing(place: Place) -> None:
    code = """
import sys
from pathlib import Path
from moeinf.runtime.eamc.append_log import RecordLog
log = RecordLog(Path(sys.argv[1]), "x.log", sys.argv[3].encode(), lambda header: None, print)
for number in range(60):
    log.append(f"{sys.argv[2]} {number}".encode() * 40)
    if number % 20 == 19:
        log.rewrite(lambda records: records)
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(place.folder), name, HEADER.decode()],
            stdout=subprocess.PIPE,
        )
        for name in "abc"
    ]
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert said == [b""] * 3
    assert [process.returncode for process in processes] == [0] * 3
    records = place.open().read()
    for name in "abc":
        mine = [r for r in records if r.startswith(name.encode())]
        assert mine == [f"{name} {number}".encode() * 40 for number in range(60)]
    assert len(records) == 180
