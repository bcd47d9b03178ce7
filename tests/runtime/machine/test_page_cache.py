"""The share of a file in the page cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moeinf.runtime.machine.page_cache import cached_share


def forget(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


@pytest.mark.linux("calls posix_fadvise")
def test_written_forgotten_read(tmp_path: Path) -> None:
    path, other, empty = tmp_path / "a", tmp_path / "b", tmp_path / "empty"
    path.write_bytes(bytes(64 * 4096 + 5))
    other.write_bytes(bytes(65 * 4096))
    empty.touch()
    assert cached_share([path, other, empty]) == 1.0
    assert cached_share([empty]) == 1.0
    forget(path)
    if cached_share([path]) == 1.0:
        pytest.skip("this file system keeps its files in memory")
    assert cached_share([path]) == 0.0
    assert cached_share([path, other]) == 0.5  # 65 pages each
    path.read_bytes()
    assert cached_share([path]) == 1.0
