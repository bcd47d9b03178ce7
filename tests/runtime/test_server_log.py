"""Test the log of background servers: bounded, private, and quoted by its last lines."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from moeinf.runtime.config import Settings
from moeinf.runtime.files.regular import NotRegular
from moeinf.runtime.server_log import keep_small, last_lines, open_log


def test_it_is_private_and_appended_to(tmp_path: Path) -> None:
    for text in (b"one\n", b"two\n"):
        log = open_log(Settings(tmp_path))
        os.write(log, text)
        os.close(log)
    path = tmp_path / "logs/server.log"
    assert path.read_bytes() == b"one\ntwo\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_it_is_bounded(tmp_path: Path) -> None:
    log = open_log(Settings(tmp_path))
    for size, left in ((1 << 20, 1 << 20), ((1 << 20) + 1, 0)):
        os.ftruncate(log, size)
        keep_small(log)
        assert os.fstat(log).st_size == left
    os.write(log, b"x")  # at the new end
    assert os.fstat(log).st_size == 1
    os.close(log)
    readable, writable = os.pipe()
    keep_small(writable)  # as under `moeinf serve --background 1 | cat`
    os.close(readable)
    os.close(writable)
    keep_small(writable)


def test_the_last_lines(tmp_path: Path) -> None:
    log = open_log(Settings(tmp_path))
    os.write(log, b"before\n")
    start = os.fstat(log).st_size
    assert last_lines(log, start) == ""
    os.write(log, b"a\n\nError: b\nTry: c\n")
    assert last_lines(log, start) == "a; b; Try: c"
    os.write(log, b"d\xff" + b"e" * 9000 + b"\n")
    assert len(last_lines(log, start)) < 4096
    assert last_lines(log, 1 << 30).endswith("e")  # it was emptied meanwhile
    os.close(log)


def test_a_fifo_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    os.mkfifo(tmp_path / "logs/server.log")
    with pytest.raises(NotRegular):
        open_log(Settings(tmp_path))
