"""A model spread over two folders: pulled, read, verified, copied and removed; one missing."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from moeinf.offload.format.drives import (
    MissingDrive,
    bare,
    drive_number,
    link_drives,
    named,
    places,
    remove_folder,
    spread_path,
)
from moeinf.offload.format.layout import ExpertKey
from moeinf.offload.format.shards import shard_path
from moeinf.runtime.library.manifest import read_manifest
from tests.cli.conftest import Command, command_in

MODEL = "models/demo/bf16"


@pytest.fixture
def homes(tmp_path: Path) -> list[Path]:
    found = [tmp_path / name for name in ("a", "b")]
    found[1].mkdir()
    return found


@pytest.fixture
def spread(homes: list[Path]) -> Command:
    """Return the command in two homes, with the demo pulled."""
    run = command_in(os.pathsep.join(map(str, homes)))
    assert run("pull", "demo").code == 0
    return run


def shards(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("E*.safetensors")}


def test_paths() -> None:
    """Neighbours of a layer are on different drives, and so are neighbouring layers."""
    keys = [ExpertKey(layer, expert) for layer in range(4) for expert in range(6)]
    for drives in (1, 2, 3):
        counts = [sum(drive_number(key, drives) == d for key in keys) for d in range(drives)]
        assert set(counts) == {24 // drives}
        for key in keys:
            assert bare(spread_path(key, drives)) == shard_path(key)
    assert spread_path(ExpertKey(1, 0), 2) == "drive-1/experts/L001/E000.safetensors"
    assert bare("drive-0/x") == "drive-0/x"  # not one of ours
    assert bare("mtp/drive-1/x") == "mtp/drive-1/x"


def test_a_model_on_two_drives(spread: Command, homes: list[Path], demo_home: Path) -> None:
    """Half of each layer's experts are in each home; content and digest are as on one drive."""
    folder, (place,) = homes[0] / MODEL, places(homes[0] / MODEL)[1:]
    assert place.parent == homes[1] / "shards"
    here, there = shards(folder), shards(place)
    assert len(here) == len(there)
    assert not here & there
    assert here | there == shards(demo_home / MODEL)
    for layer in {path.split("/")[1] for path in here}:
        assert sum(f"/{layer}/" in path for path in here) == sum(
            f"/{layer}/" in path for path in there
        )
    whole = read_manifest(demo_home / MODEL)
    assert read_manifest(folder).digest == whole.digest
    assert [s.sha256 for s in read_manifest(folder).shards()] == [s.sha256 for s in whole.shards()]
    assert spread("run", "demo", "17+25=", "--memory", "30%").out == "42\n"
    assert spread("verify", "demo").code == 0
    listed = json.loads(spread("list", "--json").out)["models"]
    assert [one["name"] for one in listed] == ["demo"]
    again = spread("pull", "demo")
    assert again.code == 0
    assert places(folder)[1:] == (place,)
    # One home is enough to read it.
    assert command_in(homes[0])("run", "demo", "17+25=").out == "42\n"


def test_damage_is_mended_on_its_drive(spread: Command, homes: list[Path]) -> None:
    (place,) = places(homes[0] / MODEL)[1:]
    files = sorted(place.rglob("E*.safetensors"))
    files[0].write_bytes(b"no shard")
    files[1].unlink()
    result = spread("verify", "demo", "--json")
    assert result.code == 1
    damaged = {one["path"] for one in json.loads(result.out)["damaged"]}
    assert damaged == {f"drive-1/{file.relative_to(place)}" for file in files[:2]}
    assert spread("verify", "demo", "--repair").code == 0
    assert spread("verify", "demo").code == 0
    assert sorted(place.rglob("*.safetensors")) == files
    assert {p.name for p in place.iterdir()} == {"experts"}


def test_a_copy_has_folders_of_its_own(spread: Command, homes: list[Path]) -> None:
    assert spread("cp", "demo", "twin").code == 0
    assert len(list((homes[1] / "shards").iterdir())) == 2
    assert spread("rm", "demo").code == 0
    (place,) = (homes[1] / "shards").iterdir()
    assert places(homes[0] / "models/twin/bf16")[1:] == (place,)
    assert spread("run", "twin:bf16", "17+25=").out == "42\n"
    assert spread("rm", "twin:bf16").code == 0
    assert not any((homes[1] / "shards").iterdir())
    assert not any((homes[0] / "models").iterdir())


def test_a_missing_drive_is_named(spread: Command, homes: list[Path]) -> None:
    """Its home may be gone, or be the empty folder on which the drive is mounted."""
    homes[1].rename(homes[1].with_name("aside"))
    for _ in range(2):
        for words in (
            ["run", "demo", "1+1="],
            ["verify", "demo"],
            ["plan", "demo"],
            ["cp", "demo", "x"],
        ):
            result = spread(*words)
            assert result.code == 1, words
            assert f"{homes[1]} is missing" in result.err, words
        homes[1].mkdir(exist_ok=True)
    assert spread("list").code == 0
    homes[1].rmdir()
    assert spread("pull", "demo:f32").code == 1
    assert str(homes[1]) in spread("devices").err
    assert not homes[1].exists()  # never made: it may be where a drive belongs
    assert spread("rm", "demo").code == 0
    assert not (homes[0] / "models/demo/bf16").exists()


def test_a_bad_drive_is_named(spread: Command, homes: list[Path]) -> None:
    """A read that fails in the middle of an answer names the file and the drive's home."""
    (place,) = places(homes[0] / MODEL)[1:]
    for file in place.rglob("E*.safetensors"):
        os.truncate(file, 4096)
    result = spread("run", "demo", "17+25=", "--memory", "30%")
    assert result.code == 1
    assert f" in {homes[1]} cannot be read" in result.err
    assert "drive-1" not in result.err


def test_an_interrupted_pull_goes_on(
    homes: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rerun keeps what both drives hold; other homes start over, and prune empties both."""
    from moeinf.runtime.library.repacking import repack

    run = command_in(os.pathsep.join(map(str, homes)))
    with monkeypatch.context() as broken:
        broken.setattr(repack, "check_opens", _fail)
        assert run("pull", "demo").code == 1
    partial = homes[0] / "models/demo/.bf16.partial"
    (place,) = places(partial)[1:]
    held = {p: p.stat().st_ino for p in place.rglob("E*.safetensors")}
    assert held
    told = json.loads(run("prune", "--list-partials", "--json").out)["partials"]
    assert told[0]["size_bytes"] > sum(p.stat().st_size for p in partial.rglob("E*") if p.is_file())
    assert run("pull", "demo").code == 0
    assert {p: p.stat().st_ino for p in place.rglob("E*.safetensors")} == held

    with monkeypatch.context() as broken:
        broken.setattr(repack, "check_opens", _fail)
        assert run("pull", "demo:f32").code == 1
    assert len(list((homes[1] / "shards").iterdir())) == 2
    assert run("prune").code == 0
    assert list((homes[1] / "shards").iterdir()) == [place]

    with monkeypatch.context() as broken:
        broken.setattr(repack, "check_opens", _fail)
        assert run("pull", "demo:f32").code == 1
    assert command_in(homes[0])("pull", "demo:f32").code == 0  # one drive: starts over
    assert list((homes[1] / "shards").iterdir()) == [place]
    assert len(places(homes[0] / "models/demo/f32")) == 1


def test_an_interrupted_pull_waits_for_its_drive(
    homes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its drive away, a rerun neither starts over nor fills the empty mount point."""
    from moeinf.runtime.library.repacking import repack

    run = command_in(os.pathsep.join(map(str, homes)))
    with monkeypatch.context() as broken:
        broken.setattr(repack, "check_opens", _fail)
        assert run("pull", "demo").code == 1
    partial = homes[0] / "models/demo/.bf16.partial"
    (place,) = places(partial)[1:]
    before = shards(partial)
    homes[1].rename(homes[1].with_name("aside"))
    for _ in range(2):
        result = run("pull", "demo")
        assert result.code == 1
        assert f"{homes[1]} is missing" in result.err
        assert shards(partial) == before
        homes[1].mkdir(exist_ok=True)
        assert not any(homes[1].iterdir())
    homes[1].rmdir()
    homes[1].with_name("aside").rename(homes[1])
    held = {p: p.stat().st_ino for p in place.rglob("E*.safetensors")}
    assert run("pull", "demo").code == 0
    assert {p: p.stat().st_ino for p in place.rglob("E*.safetensors")} == held


def test_what_a_missing_drive_keeps_is_named(spread: Command, homes: list[Path]) -> None:
    """`rm` cannot delete it, and says where it is."""
    (place,) = places(homes[0] / MODEL)[1:]
    homes[1].rename(homes[1].with_name("aside"))
    result = spread("rm", "demo")
    assert result.code == 0
    assert str(place) in result.err
    assert spread("list", "--json").out.count("demo") == 0


def test_each_drive_needs_room_for_its_part(
    homes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folders are on one device here: it needs room for all."""
    Usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, 9 << 20))
    result = command_in(os.pathsep.join(map(str, homes)))("pull", "demo")
    assert result.code == 1
    assert "are needed" in result.err


def test_links(tmp_path: Path) -> None:
    """Only links of ours are followed, and a deletion leaves all else in a home alone."""
    folder, home, other = tmp_path / "model", tmp_path / "home", tmp_path / "other"
    for made in (folder, home, other):
        made.mkdir()
    (folder / "drive-2").symlink_to(other)
    (folder / "drive-x").symlink_to(home)
    link_drives(folder, [home], "m-q4")
    first, place = places(folder)
    assert (first, place.parent) == (folder, home / "shards")
    assert named(folder, "drive-1/experts/L000/E001.safetensors") == (
        f"experts/L000/E001.safetensors in {home}"
    )
    link_drives(folder, [home], "m-q4")  # a rerun keeps its place
    assert places(folder) == (folder, place)
    (home / "kept").touch()
    (other / "kept").touch()
    remove_folder(folder)
    assert not folder.exists()
    assert not place.exists()
    assert (home / "kept").exists()
    assert (other / "kept").exists()
    with pytest.raises(MissingDrive) as error:
        link_drives(tmp_path, [home, tmp_path / "no"], "m-q4")
    assert error.value.home == tmp_path / "no"
    assert not (tmp_path / "drive-1").exists()


def _fail(*_: object) -> None:
    raise OSError("stopped here")
