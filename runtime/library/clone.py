"""Give a model on this machine another name. Only the manifest is written again."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from moeinf.errors import Conflict
from moeinf.offload.format.drives import link_like, places, remove_folder
from moeinf.runtime.config import Settings
from moeinf.runtime.files.atomic import make_folder_durably, sync_filesystem
from moeinf.runtime.library.library import Library, present
from moeinf.runtime.library.manifest import Manifest, read_manifest, write_manifest
from moeinf.runtime.library.staging import JOURNAL, discard, only_maker, partial_folder
from moeinf.runtime.names import BadName, ModelName, check_not_demo, parse_name, plain


class ModelExists(Conflict, FileExistsError):
    """A model or an unfinished pull already has the new name."""

    code = "model_exists"
    hint = "another name"


def copy_model(settings: Settings, source: str, target: str) -> ModelName:
    """Give a model a second name: link its files, copy its state, and return the name.

    The copy is absent or complete, even after a kill. Raises NoSuchModel, BadName, ModelExists,
    PullInProgress, MissingDrive.
    """
    manifest, origin = Library(settings).read(source)
    name = name_of_copy(target, manifest)
    link_model(settings, manifest, origin, replace(manifest, name=name.name))
    return name


def name_of_copy(target: str, manifest: Manifest) -> ModelName:
    """Return the name of a copy, which has the tag of its origin. Raises BadName."""
    tag = manifest.tag
    name = parse_name(target if ":" in plain(target) else f"{plain(target)}:{tag}")
    if name.tag != tag:
        raise BadName(f"{target!r}: {manifest.model} is {tag}, and a copy of it is too")
    return name


def link_model(
    settings: Settings,
    manifest: Manifest,
    origin: Path,
    copy: Manifest,
    replaces: Callable[[Manifest], bool] = lambda _: False,
) -> None:
    """Install `copy`, a manifest of the files of the model in `origin`, by links to them.

    replaces: returns whether a model that has the name already may go. Its state stays if its files
    are the same. Raises as copy_model, and ModelInUse.
    """
    library, name = Library(settings), copy.model
    folder = library.folder(name)
    with only_maker(folder, library.locks):
        before = read_manifest(folder) if library.has(name) else None
        if before is not None and not replaces(before):
            raise ModelExists(f"{name} already exists; `moeinf rm {name}` removes it")
        library.check_unused(name)
        check_not_demo(name)
        work = partial_folder(folder)
        if (work / JOURNAL).exists():
            raise ModelExists(f"{name} has an unfinished pull; `moeinf prune` removes it")
        remove_folder(work, ignore_errors=True)  # left by a copy that was killed
        try:
            with present(manifest.model, origin):
                link_like(origin, work, f"{name.name}-{name.tag}")
                for file in manifest.files:
                    (work / file.path).parent.mkdir(parents=True, exist_ok=True)
                    link_file(origin / file.path, work / file.path)
                write_manifest(work, copy)
                if before is None or before.digest != manifest.digest:
                    _copy_state(settings.state_of(manifest.model), settings.state_of(name))
                for place in places(work):
                    sync_filesystem(place)
                library.admit(work, name)
        finally:
            discard(folder)


def _copy_state(origin: Path, target: Path) -> None:
    """Copy the state files that the use of a model created."""
    shutil.rmtree(target, ignore_errors=True)
    for file in origin.iterdir() if origin.is_dir() else ():
        if file.is_file():
            make_folder_durably(target)
            shutil.copy2(file, target / file.name)


def link_file(origin: Path, target: Path) -> None:
    """Hard-link a file, or copy it if the file system does not support the link."""
    try:
        target.hardlink_to(origin)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EMLINK, errno.EXDEV, errno.ENOTSUP):
            raise
        shutil.copyfile(origin, target)
