"""Read tables of `.bin` files by ranges: torch's result for the whole file, or an error."""

from __future__ import annotations

import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint, SourceTensor
from moeinf.runtime.checkpoints.remote_torch_bin import check_table, read_remote_table
from moeinf.runtime.checkpoints.torch_bin import MAX_PICKLE_BYTES, read_torch_file
from tests.runtime.checkpoints.test_torch_bin import Canary


class Remote:
    """A remote file that records the requested ranges."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.asked: list[tuple[int, int]] = []

    def read(self, start: int, stop: int) -> bytes:
        self.asked.append((start, stop))
        with self.path.open("rb") as file:
            return os.pread(file.fileno(), stop - start, start)

    def table(self, path: Path) -> dict[str, SourceTensor]:
        return read_remote_table(self.path.stat().st_size, self.read, path)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Save tensors and names of many lengths; some tensors share a storage."""
    random = torch.Generator().manual_seed(0)
    whole = torch.randn(9, 40_000, generator=random)
    tensors = {f"layer.{'x' * (n % 70)}.{n}": torch.ones(n % 41 + 1) for n in range(300)}
    torch.save({**tensors, "whole": whole, "rows": whole[3:5]}, tmp_path / "x.bin")
    return tmp_path / "x.bin"


def test_it_is_the_table_of_the_whole_file(saved: Path, tmp_path: Path) -> None:
    remote, at = Remote(saved), tmp_path / "away" / "x.bin"
    table = remote.table(at)
    assert len(table) == 302
    assert table == {name: replace(t, path=at) for name, t in read_torch_file(saved).items()}
    assert not at.parent.exists()  # inspecting a repository writes nothing
    assert len(remote.asked) < 15
    assert sum(stop - start for start, stop in remote.asked) < 80_000
    at.parent.mkdir()
    saved.rename(at)
    check_table(at, table)


def test_a_file_that_came_otherwise(saved: Path, tmp_path: Path) -> None:
    table = Remote(saved).table(tmp_path / "away" / "x.bin")
    moved = replace(table["whole"], offset=table["whole"].offset + 64)
    (tmp_path / "away").mkdir()
    saved.rename(tmp_path / "away" / "x.bin")
    with pytest.raises(BadCheckpoint, match="not laid out as torch"):
        check_table(tmp_path / "away" / "x.bin", {**table, "whole": moved})


def test_a_zip_without_padding(saved: Path, tmp_path: Path) -> None:
    """PyTorch reads it, but ranges do not show where its bytes begin."""
    with (
        zipfile.ZipFile(saved) as source,
        zipfile.ZipFile(tmp_path / "packed.bin", "w", zipfile.ZIP_STORED) as packed,
    ):
        for entry in source.infolist():
            packed.writestr(entry.filename, source.read(entry))
    with pytest.raises(BadCheckpoint, match="not laid out as torch"):
        Remote(tmp_path / "packed.bin").table(tmp_path / "away" / "x.bin")


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Canary()}, "evil.bin")
    with pytest.raises(BadCheckpoint, match="holds more than tensors"):
        Remote(Path("evil.bin")).table(tmp_path / "away" / "x.bin")
    assert not (tmp_path / "canary-ran").exists()
    (tmp_path / "text.bin").write_bytes(b"no zip" * 100)
    with pytest.raises(BadCheckpoint, match="is not a PyTorch zip file"):
        Remote(tmp_path / "text.bin").table(tmp_path / "away" / "x.bin")
    assert not (tmp_path / "away").exists()


def test_no_table_makes_it_fetch_everything(tmp_path: Path) -> None:
    """The pickle is larger than any table."""
    path = tmp_path / "large.bin"
    with zipfile.ZipFile(path, "w") as archive, archive.open("x/data.pkl", "w") as record:
        for _ in range(MAX_PICKLE_BYTES >> 20):
            record.write(bytes(1 << 20))
    remote = Remote(path)
    with pytest.raises(BadCheckpoint, match="too large"):
        remote.table(tmp_path / "away" / "x.bin")
    assert sum(stop - start for start, stop in remote.asked) < 1 << 20


@pytest.mark.parametrize("field", [b"\xe8" * 4, b"\xff" * 4])
def test_a_directory_with_odd_names_or_places(field: bytes, saved: Path, tmp_path: Path) -> None:
    """A name is not valid UTF-8, and a record begins beyond the file.

    The fuzzer found both.
    """
    data = bytearray(saved.read_bytes())
    entry = data.rindex(b"PK\1\2")  # the last entry of the directory
    if field[0] == 0xE8:
        data[entry + 46 : entry + 50] = field
    else:
        data[entry + 42 : entry + 46] = (0x7FFFFFFF).to_bytes(4, "little")
    saved.write_bytes(data)
    with pytest.raises(BadCheckpoint, match=r"x\.bin"):
        Remote(saved).table(tmp_path / "away" / "x.bin")
