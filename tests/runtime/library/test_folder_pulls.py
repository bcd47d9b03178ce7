"""Pulls of a folder: what an interrupted one keeps, and which change starts it over."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint, open_checkpoint
from moeinf.runtime.config import Settings
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.library.repacking import repack as repacking
from moeinf.runtime.library.repacking import shard_writer
from moeinf.runtime.library.repacking.repack import repack
from moeinf.runtime.library.sources import LocalSource
from moeinf.runtime.library.staging import JOURNAL, StagingFolder, partial_folder
from moeinf.runtime.names import parse_name
from tests.conftest import ignore

NAME = parse_name("mine:bf16")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(DEMO_CHECKPOINT, tmp_path / "checkpoint")


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return Library(Settings(tmp_path / "home"))


def source_of(folder: Path) -> LocalSource:
    return LocalSource.watched(open_checkpoint(folder), str(folder))


def pull(
    folder: Path, library: Library, progress: Callable[[str, int, int], None] = ignore
) -> Manifest:
    return repack(source_of(folder), library, NAME, progress, ignore)


def weights(place: Path) -> dict[str, tuple[int, int]]:
    """Return the inode and the time of the last write of every finished file of weights."""
    return {
        str(path.relative_to(place)): (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in place.rglob("*.safetensors")
    }


def recorded(partial: Path) -> set[str]:
    """Return the files of weights that the journal calls finished."""
    lines = (partial / JOURNAL).read_text().splitlines()
    return {
        name
        for name in weights(partial)
        if any(line.startswith('{"file"') and f'"{name}"' in line for line in lines)
    }


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write each file in 10 ms at least, and commit at every look at the workers."""
    write = shard_writer.write_file

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.01)
        return write(*arguments)

    monkeypatch.setattr(shard_writer, "write_file", slowly)
    monkeypatch.setattr(shard_writer, "_COMMIT_S", 0.0)


@pytest.fixture
def interrupted(folder: Path, library: Library, slow: None) -> Path:
    """Interrupt a pull when some of its files are recorded; return its folder."""
    partial = partial_folder(library.folder(NAME))

    def stop(_phase: str, _done: int, _total: int) -> None:
        if len(recorded(partial)) >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(folder, library, stop)
    return partial


def test_an_interrupted_pull_keeps_its_shards(
    interrupted: Path, folder: Path, library: Library
) -> None:
    """They are not written again, although one file holds all weights."""
    before = {name: weights(interrupted)[name] for name in recorded(interrupted)}
    assert 3 <= len(before) < 193
    manifest = pull(folder, library)
    after = weights(library.folder(NAME))
    assert len(after) == 193
    assert {name: after[name] for name in before} == before
    assert not interrupted.exists()
    shutil.rmtree(library.folder(NAME))
    assert {f.path: f.sha256 for f in pull(folder, library).files} == {
        f.path: f.sha256 for f in manifest.files
    }


def rewrite(path: Path) -> None:
    """Change a byte, and restore the time of the last write."""
    about = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


CHANGES: dict[str, Callable[[Path], object]] = {
    "model.safetensors": rewrite,
    "config.json": Path.touch,
    "tokenizer.json": Path.touch,
    "chat_template.jinja": Path.unlink,
    "special_tokens_map.json": lambda path: path.write_text("{}"),
}


@pytest.mark.parametrize("file", CHANGES)
def test_a_changed_folder_has_another_revision(file: str, folder: Path) -> None:
    before = source_of(folder)
    assert source_of(folder).revision == before.revision
    (folder / "README.md").write_text("no part of the model")
    assert source_of(folder).identity() == before.identity()
    CHANGES[file](folder / file)
    assert source_of(folder).revision != before.revision
    assert source_of(folder).identity() != before.identity()


def test_a_folder_that_changed_is_packed_from_the_start(
    interrupted: Path, folder: Path, library: Library
) -> None:
    before = {name: weights(interrupted)[name] for name in recorded(interrupted)}
    rewrite(folder / "model.safetensors")
    whole = pull(folder, library)
    after = weights(library.folder(NAME))
    assert not [name for name in before if after[name] == before[name]]
    assert library.made_of(NAME, str(folder), whole.revision) == whole
    rewrite(folder / "model.safetensors")
    assert library.made_of(NAME, str(folder), source_of(folder).revision) is None


def test_a_folder_that_changes_during_the_pull_is_refused(folder: Path, library: Library) -> None:
    def change(_phase: str, done: int, _total: int) -> None:
        if done:
            rewrite(folder / "model.safetensors")

    with pytest.raises(BadCheckpoint, match=r"model\.safetensors changed during the pull") as told:
        pull(folder, library, change)
    assert "the same command" in told.value.hint
    assert (library.installed(), library.partials()) == ([], [])


def test_a_full_disk_keeps_what_is_finished(
    folder: Path, library: Library, slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(repacking, "check_opens", full)
        with pytest.raises(OSError, match="No space"):
            pull(folder, library)
    partial = partial_folder(library.folder(NAME))
    before = weights(partial)
    assert len(recorded(partial)) == 193
    pull(folder, library)
    assert weights(library.folder(NAME)) == before


def test_a_journal_of_another_folder_is_not_continued(
    interrupted: Path, folder: Path, tmp_path: Path
) -> None:
    """The other folder has equal files, with their times."""
    other = shutil.copytree(folder, tmp_path / "other")
    making = {"source": source_of(other).identity(), "tag": NAME.tag}
    assert StagingFolder(interrupted, making).files == {}


def test_what_follows_a_torn_line_is_kept(tmp_path: Path) -> None:
    """A power cut tears the journal's last line; the next attempt's lines are whole."""
    making = {"tag": "q4"}
    StagingFolder(tmp_path, making)
    journal = tmp_path / JOURNAL
    journal.write_bytes(journal.read_bytes() + b'{"done": "a.safeten')
    again = StagingFolder(tmp_path, making)
    assert again.done == set()
    again.add_done("b.safetensors")
    again.commit()
    assert StagingFolder(tmp_path, making).done == {"b.safetensors"}
