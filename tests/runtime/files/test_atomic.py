"""Atomic files: written completely or not at all, also by several processes at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moeinf.runtime.files.atomic import write_bytes_durably


def test_several_that_write_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    texts = [bytes([48 + number]) * 300_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            list(pool.map(lambda text: write_bytes_durably(path, text), texts))
            assert path.read_bytes() in texts
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_beside_it_stays(tmp_path: Path) -> None:
    """The user's files stay; a killed process's temporary file is reused."""
    (tmp_path / "x.partial").write_text("mine")
    (tmp_path / ".x.partial").write_text("half of something longer")
    write_bytes_durably(tmp_path / "x", b"whole", mode=0o600)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "x": "whole",
        "x.partial": "mine",
    }


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(OSError, match="x"):
        write_bytes_durably(tmp_path / "x", b"data")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
