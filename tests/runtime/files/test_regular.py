"""Checkpoint folders whose files are devices, FIFOs, sockets, folders or links to elsewhere."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint, open_checkpoint, read_json
from moeinf.runtime.checkpoints.torch_bin import open_folder
from moeinf.runtime.config import Settings
from moeinf.runtime.files.regular import NotRegular, read_regular
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.repacking.repack import repack
from moeinf.runtime.library.sources import LocalSource
from moeinf.runtime.library.verify import LocalRepair
from moeinf.runtime.names import ModelName
from tests.runtime.hub_pulls import write_repository

INDEX = "model.safetensors.index.json"


def fifo(path: Path) -> None:
    os.mkfifo(path)


def zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def unix_socket(path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("needs Linux: names a folder in /proc")
    at = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{at}/{path.name}")  # socket paths have a short limit
    os.close(at)


ODD: dict[str, Callable[[Path], None]] = {
    "FIFO": fifo,
    "link to /dev/zero": zero,
    "socket": unix_socket,
    "folder": Path.mkdir,
    "link to itself": lambda path: path.symlink_to(path.name),
}


def within(seconds: float, work: Callable[[], object]) -> None:
    """Run something that may hang, and re-raise its errors."""
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            ended.append(error)
        else:
            ended.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert ended, "it hangs"
    if ended[0] is not None:
        raise ended[0]


def pull(folder: Path, home: Path) -> None:
    name = ModelName("x", "bf16")
    source = LocalSource(open_folder(folder), "x")
    repack(source, Library(Settings(home)), name, lambda *_: None, lambda _: None)


@pytest.mark.parametrize("odd", sorted(ODD))
@pytest.mark.parametrize(
    "file", ["config.json", INDEX, "weights", "tokenizer.json", "pytorch_model.bin"]
)
def test_what_is_no_regular_file_is_refused(file: str, odd: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    weights = write_repository(folder)
    if file == "pytorch_model.bin":
        for path in (*folder.glob("*.safetensors"), folder / INDEX):
            path.unlink()
    path = folder / (weights[0] if file == "weights" else file)
    path.unlink(missing_ok=True)
    ODD[odd](path)
    with pytest.raises(BadCheckpoint):
        within(20, lambda: pull(folder, tmp_path / "home"))
    assert Library(Settings(tmp_path / "home")).installed() == []


@pytest.mark.parametrize("file", ["chat_template.jinja", "generation_config.json", "config.json"])
def test_links_to_private_files_are_refused(file: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    write_repository(folder)
    secret = tmp_path / "secret"
    secret.write_bytes((folder / "config.json").read_bytes())
    (folder / file).unlink(missing_ok=True)
    (folder / file).symlink_to(secret)
    with pytest.raises(BadCheckpoint, match=f"{file} is refused"):
        pull(folder, tmp_path / "home")
    with pytest.raises(BadCheckpoint, match=f"{file} is refused"):
        read_json(folder / file)
    assert Library(Settings(tmp_path / "home")).installed() == []


def test_links_within_the_folder_and_into_the_cache_are_followed(tmp_path: Path) -> None:
    """huggingface_hub lays out its cache in this way; weights may be on another disk."""
    folder = tmp_path / "models--Org--Small/snapshots/main"
    blobs, disk = tmp_path / "models--Org--Small/blobs", tmp_path / "disk"
    weights = write_repository(folder)
    for place in (blobs, disk, folder / "inner"):
        place.mkdir()
    for file, place in {
        "config.json": blobs,
        weights[0]: disk,
        "tokenizer.json": folder / "inner",
    }.items():
        (folder / file).rename(place / file)
        (folder / file).symlink_to(os.path.relpath(place / file, folder))
    pull(folder, tmp_path / "home")
    source = LocalRepair(open_checkpoint(folder))
    assert source.small_file("config.json") == (blobs / "config.json").read_bytes()


@pytest.mark.linux("reads /proc")
def test_reading_ends_at_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert read_regular(path, 5) == b"12345"
    with pytest.raises(NotRegular, match="too large"):
        read_regular(path, 4)
    assert read_regular(Path("/proc/self/status"), 1 << 20)  # stat reports a size of 0
    with pytest.raises(NotRegular, match="too large"):
        read_regular(Path("/proc/self/status"), 10)
