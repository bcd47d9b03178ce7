"""Space of an unfinished pull: counted when the next pull needs room, and by `prune`."""

from __future__ import annotations

import shutil
import threading
from collections import namedtuple
from pathlib import Path

import pytest

from moeinf.models.families import family_of
from moeinf.runtime.checkpoints.checkpoint import open_checkpoint
from moeinf.runtime.checkpoints.inventory import take_inventory
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from moeinf.runtime.library.repacking.repack import check_space
from moeinf.runtime.library.sources import LocalSource
from moeinf.runtime.library.staging import StagingFolder, taken_bytes

MIB = 1 << 20
Usage = namedtuple("Usage", ["total", "used", "free"])


class Remote(LocalSource):
    """A source that writes 3 MiB into the staging folder."""

    def space_bytes(self) -> int:
        return 3 * MIB


def test_what_an_interrupted_pull_has_written_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has just enough room.

    Two source files and a part of a shard exist already.
    """
    source = Remote(open_checkpoint(DEMO_CHECKPOINT), "demo")
    inventory = take_inventory(family_of(source.checkpoint.config), source.checkpoint)
    work = StagingFolder(tmp_path / "work", {})
    disk = inventory.disk_bytes("BF16") + 3 * MIB
    (work.folder / "source").mkdir()
    for name in ("source/a.safetensors", "source/b.incomplete", "experts.parts"):
        (work.folder / name).write_bytes(bytes(MIB))
    with (work.folder / "source/b.incomplete").open("ab") as file:
        file.truncate(1 << 30)  # a file during its download: most of it is a hole

    def usage(_: object) -> Usage:
        taken = taken_bytes(tmp_path)
        return Usage(disk, taken, disk - taken)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    assert 3 * MIB <= taken_bytes(tmp_path) < 4 * MIB
    check_space(work, inventory, "BF16", source)
    disk -= 1
    with pytest.raises(OSError, match="are needed, the disk has"):
        check_space(work, inventory, "BF16", source)


def test_sizes_of_a_folder_that_is_going_away(tmp_path: Path) -> None:
    """A pull renames and deletes files meanwhile; a missing file counts 0 bytes."""
    ended = threading.Event()

    def churn() -> None:
        while not ended.is_set():
            for number in range(20):
                (tmp_path / "a/b").mkdir(parents=True, exist_ok=True)
                (tmp_path / "a/b" / str(number)).write_bytes(b"x")
            shutil.rmtree(tmp_path / "a")

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        sizes = [taken_bytes(tmp_path) for _ in range(300)]
    finally:
        ended.set()
        thread.join()
    assert min(sizes) >= 0
    assert taken_bytes(tmp_path / "absent") == 0


@pytest.mark.parametrize(("repository", "kept"), [("org/one", True), ("org/two", False)])
def test_what_was_fetched_stays_where_another_making_is_of_the_same_repository(
    repository: str, kept: bool, tmp_path: Path
) -> None:
    """Source files are hashed before use, so they stay when only the journal's form differs."""
    folder = tmp_path / "work"
    work = StagingFolder(folder, {"source": {"repository": "org/one", "commit": "c"}, "tag": "q4"})
    for name in ("source/a.incomplete", "experts/L000/E000.safetensors", "experts.parts"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    work.add_done("b")
    work.commit()
    work = StagingFolder(folder, {"source": {"repository": repository, "files": "f"}, "tag": "q4"})
    assert not work.done
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert left == {"journal.jsonl", *(["source/a.incomplete"] if kept else [])}
