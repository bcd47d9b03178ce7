"""Test direct I/O: every size and offset around pages and blocks, and refusals of O_DIRECT."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from moeinf.native import PAGE_BYTES
from moeinf.offload.format.direct_io import BLOCK_BYTES, DirectReader, DirectWriter

fcntl = pytest.importorskip("fcntl", reason="needs the flags of open files, which Windows lacks")
pytestmark = pytest.mark.linux("opens files with O_DIRECT")
SIZES = [0, 1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 777]


def write(path: Path, data: bytes, *cuts: int) -> None:
    """Write the data in pieces that end at `cuts`."""
    with DirectWriter(path) as file:
        for start, stop in zip((0, *cuts), (*cuts, len(data)), strict=True):
            file.write(memoryview(data)[start:stop])
        file.finish()


@pytest.fixture(params=["disk", "no open", "no call"])
def file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Give the real file system, one that refuses O_DIRECT, one that refuses later calls."""

    def refuse(name: str, asks: Callable[..., int]) -> None:
        call = getattr(os, name)

        def wrapped(*arguments: object) -> object:
            if asks(*arguments):
                raise OSError(errno.EINVAL, "refused")
            return call(*arguments)

        monkeypatch.setattr(os, name, wrapped)

    if request.param == "no open":
        refuse("open", lambda path, flags, *_: flags & os.O_DIRECT)
    if request.param == "no call":
        for name in ("pwrite", "preadv"):
            refuse(name, lambda number, *_: fcntl.fcntl(number, fcntl.F_GETFL) & os.O_DIRECT)
    return str(request.param)


@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_is_read(size: int, file_system: str, tmp_path: Path) -> None:
    data, path = random.Random(size).randbytes(size), tmp_path / "x"
    write(path, data, size // 3, size // 2)
    assert path.read_bytes() == data
    with DirectReader(path) as file:
        for offset in (0, 1, PAGE_BYTES, size // 2 + 5):
            count = min(BLOCK_BYTES, max(0, size - offset))
            assert bytes(file.read(offset, count)) == data[offset : offset + count]
        assert bytes(file.read(max(0, size - 3), 10)) == data[-3:]
        assert bytes(file.read(size + PAGE_BYTES, 10)) == b""


def test_short_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, real = random.Random(1).randbytes(3 * BLOCK_BYTES + 5), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda n, block, at: real(n, block[: 5 * PAGE_BYTES], at))
    write(tmp_path / "x", data)
    assert (tmp_path / "x").read_bytes() == data


def test_a_longer_file_of_that_name_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(3 * PAGE_BYTES))
    write(tmp_path / "x", b"short")
    assert (tmp_path / "x").read_bytes() == b"short"


def test_other_errors_are_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="full"):
        write(tmp_path / "x", bytes(10))
    with pytest.raises(FileNotFoundError):
        DirectReader(tmp_path / "y")


def test_descriptors_are_closed(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        write(tmp_path / "x", bytes(100))
        with DirectReader(tmp_path / "x") as file:
            file.read(0, 100)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
