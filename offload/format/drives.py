"""Spread the shards of a model over several drives: links in its folder, and the paths over them.

    experts/L003/E017.safetensors            on the drive of the folder
    drive-1/experts/L003/E018.safetensors    on another one:
    drive-1 ──link──▶ HOME/shards/<name>-<tag>-<random>

Neighbouring experts of a layer are on different drives, so the misses of a layer use all of them. A
manifest has the paths with their drive. They lead through the links, so whatever reads, hashes or
links a file of a model needs to know nothing of drives.

The link is made before the folder behind it, and deleted after it. So a folder of shards always has
a link, also after a kill. Only a model that is deleted while a drive is away leaves its folder.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from moeinf.errors import Unavailable
from moeinf.offload.format.layout import ExpertKey
from moeinf.offload.format.shards import shard_path

SHARDS = "shards"  # the folder of a further home
_LINK = re.compile(r"drive-[1-9][0-9]{0,2}")


class MissingDrive(Unavailable, OSError):
    """A folder for a part of a model is missing."""

    code = "missing_drive"
    hint = "`mount`, which attaches its drive, or `moeinf pull MODEL` without that folder"

    def __init__(self, home: Path, model: str = "models") -> None:
        super().__init__(f"{home} is missing: a part of the experts of {model} belongs there")
        self.home = home


def check_homes(homes: Sequence[Path], model: str = "models") -> None:
    """Raise MissingDrive for a further home that does not exist: its drive may not be attached."""
    for home in homes:
        if not home.is_dir():
            raise MissingDrive(home, model)


def drive_number(key: ExpertKey, drives: int) -> int:
    """Return the drive of an expert, from 0, of a model that is on so many."""
    return (key.layer + key.expert) % drives


def spread_path(key: ExpertKey, drives: int) -> str:
    """Return the path of a shard of a model that is on so many drives."""
    drive = drive_number(key, drives)
    return f"drive-{drive}/{shard_path(key)}" if drive else shard_path(key)


def link_of(path: str) -> str:
    """Return the link that a path of a manifest begins with; "": it is on the folder's drive."""
    first = path.partition("/")[0]
    return first if _LINK.fullmatch(first) else ""


def bare(path: str) -> str:
    """Return a path of a manifest as it would be on one drive."""
    return path.removeprefix(f"{link_of(path)}/")


def link_drives(folder: Path, homes: Sequence[Path], label: str) -> None:
    """Give an unfinished model's folder a place in each of these homes, unless it has one.

    label: the beginning of the places' names. Raises MissingDrive.
    """
    check_homes(homes, label)
    for number, home in enumerate(homes, 1):
        link = folder / f"drive-{number}"
        if not link.is_symlink():
            (home / SHARDS).mkdir(exist_ok=True)
            link.symlink_to(home / SHARDS / f"{label}-{os.urandom(4).hex()}")
        link.readlink().mkdir(exist_ok=True)


def link_like(origin: Path, folder: Path, label: str) -> None:
    """Give a folder places in the homes of `origin`. Raises MissingDrive."""
    folder.mkdir(parents=True, exist_ok=True)
    link_drives(folder, [place.parents[1] for place in places(origin)[1:]], label)


def places(folder: Path) -> tuple[Path, ...]:
    """Return a model's folder, and the folders of its shards on other drives, in their order."""
    links = (path for path in _children(folder) if _LINK.fullmatch(path.name))
    found = [(int(path.name[6:]), path.readlink()) for path in links if path.is_symlink()]
    ours = sorted(pair for pair in found if _ours(pair[1]))
    return (folder, *(place for _, place in ours))


def places_away(folder: Path) -> list[Path]:
    """Return the folders of a model's shards that are on drives which are not there."""
    return [place for place in places(folder)[1:] if not place.is_dir()]


def check_drives(folder: Path, model: str) -> None:
    """Raise MissingDrive if a drive of an installed model is not there."""
    for place in places_away(folder):
        raise MissingDrive(place.parents[1], model)


def check_unfinished(folder: Path, model: str) -> None:
    """Raise MissingDrive if a drive of an unfinished model is not there.

    A killed pull may have made a link and not the folder behind it, but the folder of all shards.
    """
    for place in places(folder)[1:]:
        if not place.parent.is_dir():
            raise MissingDrive(place.parents[1], model)


def named(folder: Path, path: str) -> str:
    """Return a path of a manifest for an error, with the home of its drive."""
    if not link_of(path):
        return path
    return f"{bare(path)} in {(folder / link_of(path)).readlink().parents[1]}"


def remove_folder(folder: Path, ignore_errors: bool = False) -> None:
    """Delete a folder of a model, and its shards on other drives as far as they are there."""
    for place in places(folder)[1:]:
        shutil.rmtree(place, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=ignore_errors)


def _ours(place: Path) -> bool:
    """Return whether a link leads to a folder that link_drives makes; others are not deleted."""
    return place.is_absolute() and place.parent.name == SHARDS and ".." not in place.parts


def _children(folder: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(folder)]
    except OSError:
        return []
