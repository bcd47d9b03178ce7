"""System calls that fail below a home: each command ends in plain words, never with an errno."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moeinf.cli.main import answer
from moeinf.errors import DiskFull, FileError, as_moeinf, problem, reason
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from tests.faults.conftest import Tally

NUMBERS = ("ENOSPC", "EACCES", "EROFS", "EMFILE", "ENOENT", "EIO")
WORDS = {
    "ENOSPC": "the disk is full",
    "EACCES": "permission denied",
    "EROFS": "the file system is read-only",
    "EMFILE": "too many open files",
    "ENOENT": "no such file or folder",
    "EIO": "the drive cannot read or write it",
}
CALLS = ((os, "open"), (io, "open"), (os, "mkdir"), (os, "rename"), (os, "unlink"))
COMMANDS = [
    ["pull", "demo", "--name", "other"],
    ["pull", "FOLDER", "--name", "mine"],
    ["verify", "demo"],
    ["show", "demo"],
    ["list"],
    ["ps"],
    ["prune"],
    ["cp", "demo", "second"],
    ["rm", "demo"],
    ["eamc", "show", "demo"],
    ["eamc", "export", "demo", "FOLDER/out.eamc"],
    ["run", "demo", "17+25="],
]
# Parts of a message that no user can act on.
INTERNAL = re.compile(r"\[?Errno|os error|Traceback|bug in moeinf|/\.[^/\s]+\.(partial|old|repair)")


class Failing:
    """Calls that name a file below `folder` raise, from the `first` one on."""

    def __init__(self, folder: Path, number: int, first: int) -> None:
        self.folder, self.number, self.first, self.count = str(folder), number, first, 0

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def failing(path: Any, *arguments: Any, **options: Any) -> Any:
            if not isinstance(path, int) and os.fsdecode(path).startswith(self.folder):
                self.count += 1
                if self.count >= self.first:
                    raise OSError(self.number, os.strerror(self.number), os.fspath(path))
            return call(path, *arguments, **options)

        return failing


@pytest.fixture
def home(demo_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    shutil.copytree(demo_home / "models/demo/bf16", home / "models/demo/bf16")
    shutil.copytree(DEMO_CHECKPOINT, tmp_path / "folder")
    monkeypatch.setenv("MOEINF_HOME", str(home))
    monkeypatch.setenv("MOEINF_HOST", "127.0.0.1:1")
    return home


@pytest.mark.parametrize("name", NUMBERS)
def test_commands_end_in_words(
    name: str,
    every_point: bool,
    home: Path,
    demo_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tally: Tally,
) -> None:
    codes: Counter[int] = Counter()
    for given in COMMANDS if every_point else COMMANDS[2:8]:
        command = [word.replace("FOLDER", str(home.parent / "folder")) for word in given]
        for first in (1, 2, 3, 5, 8, 13) if every_point else (1, 3):
            failing = Failing(home, getattr(errno, name), first)
            with monkeypatch.context() as patch:
                for owner, call in CALLS:
                    patch.setattr(owner, call, failing.wrap(getattr(owner, call)))
                code = answer(command)
            said = capfd.readouterr()
            told = f"{command}, from call {first}: {said.out} {said.err}"
            assert code in (0, 1), told
            assert INTERNAL.search(said.out + said.err) is None, told
            if code == 1 and failing.count >= first:
                assert said.err.startswith("Error: ") or "\nError: " in said.err or said.out, told
            codes[code] += 1
            tally(f"exit code {code}")
            if not (home / "models/demo/bf16/manifest.json").exists():  # `rm` was quicker
                shutil.copytree(demo_home / "models/demo/bf16", home / "models/demo/bf16")
    assert codes[1] >= 3, codes


@pytest.mark.parametrize("name", NUMBERS)
def test_words_of_a_system_error(name: str) -> None:
    number = getattr(errno, name)
    told = as_moeinf(OSError(number, os.strerror(number), "/home/x/file"))
    assert str(told) == f"/home/x/file: {WORDS[name]}"
    assert isinstance(told, DiskFull if name == "ENOSPC" else FileError)
    assert told.hint
    assert "MOEINF_DEBUG" not in told.hint


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/h/.moeinf/models/demo/.q4.partial/experts/L0/E1.safetensors", "/h/.moeinf/models/demo"),
        ("/h/.moeinf/models/demo/.q4.old", "/h/.moeinf/models/demo"),
        (b"/h/models/.x.partial/journal.jsonl", "/h/models"),
        ("/h/.moeinf/run/pull-demo-q4.lock", "/h/.moeinf/run/pull-demo-q4.lock"),
        ("out.partial", "out.partial"),
    ],
)
def test_a_message_names_no_folder_of_unfinished_work(path: str | bytes, shown: str) -> None:
    error = OSError(errno.EIO, os.strerror(errno.EIO), path)
    assert reason(error) == f"{shown}: {WORDS['EIO']}"


def test_words_of_other_origin_stay() -> None:
    ours = OSError(errno.ENOSPC, "3 GiB are needed, the disk has 1 GiB free", "/h/.q4.partial")
    assert reason(ours) == "/h: 3 GiB are needed, the disk has 1 GiB free"
    assert reason(ValueError("No such file or directory (os error 2)")) == (
        "No such file or directory"
    )
    assert reason(OSError("[Errno 111] Connection refused")) == "Connection refused"
    assert problem(OSError(errno.EIO, "it ends early")) == "it ends early"


@pytest.mark.parametrize("given", [["cp", "demo", "second"], ["pull", "demo:f32"], ["devices"]])
def test_a_write_without_a_name_gets_one(
    given: list[str], home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A write fails by its descriptor; the error names a folder below the home."""

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    assert answer(given) == 1
    told = capfd.readouterr().err
    assert re.search(rf"Error: {home}/\S+: the disk is full", told), told
    assert not INTERNAL.search(told), told
