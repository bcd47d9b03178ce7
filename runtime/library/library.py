"""List, find, admit and remove the models on this machine."""

from __future__ import annotations

import difflib
import glob
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from moeinf.errors import Conflict, NotFound, reason
from moeinf.offload.format.drives import check_drives, remove_folder
from moeinf.runtime.config import Settings
from moeinf.runtime.files.atomic import make_folder_durably, sync_folder
from moeinf.runtime.library.manifest import (
    MANIFEST,
    DamagedModel,
    Manifest,
    read_manifest,
    storable,
)
from moeinf.runtime.library.processes import LiveEngine, Registry
from moeinf.runtime.library.staging import (
    OLD,
    PARTIAL,
    PullInProgress,
    discard,
    old_folder,
    only_maker,
    taken_on_drives,
)
from moeinf.runtime.names import TAGS, ModelName, default_tag, is_tag, parse_name, plain

_LAST_USED = "last_used"  # an empty file; only its modification time is used
DEMO_CHECKPOINT = Path(__file__).parents[2] / "models" / "demo"


class NoSuchModel(NotFound, LookupError):
    """No model of that name is on this machine. tags: the installed tags of that name."""

    code = "model_not_found"

    def __init__(self, wanted: str, nearest: list[str], tags: tuple[str, ...] = ()) -> None:
        only = f", only {' and '.join(tags)}" if tags else ""
        super().__init__(f"there is no model {wanted!r} on this machine{only}")
        self.wanted = wanted
        self.nearest = nearest
        self.tags = tags
        self.hint = _other_names(wanted, nearest, tags)


@contextmanager
def present(name: ModelName | str, folder: Path) -> Iterator[None]:
    """Make any error NoSuchModel if another process has deleted the model meanwhile."""
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # of whichever of its files was read first
        if isinstance(error, NoSuchModel) or os.path.lexists(folder / MANIFEST):
            raise
        raise NoSuchModel(str(name), []) from error


def _other_names(wanted: str, nearest: list[str], tags: tuple[str, ...]) -> str:
    if tags:
        return f"{tags[0]}, or `moeinf pull {wanted}`, which adds the other"
    near = f"{', '.join(nearest)}, or " if nearest else ""
    add = f"`moeinf pull ./folder --name {wanted}`, which adds one"
    return f"{near}`moeinf list`, which shows all, or {add}"


class ModelInUse(Conflict, RuntimeError):
    """A live engine is running the model."""

    code = "model_in_use"
    hint = "`moeinf stop MODEL`, which unloads it"


class NoModelUsed(NotFound, LookupError):
    """The command names no model, and no model was used before."""

    code = "no_model_used"
    hint = "`moeinf trace MODEL --dataset demo`"


@dataclass(frozen=True)
class Installed:
    """One model on this machine. A damaged one has manifest None, and `problem` says why."""

    name: ModelName
    folder: Path
    manifest: Manifest | None
    problem: str = ""


@dataclass(frozen=True)
class Partial:
    """The remains of an unfinished pull, cp or rm. size_bytes: their size on disk."""

    name: ModelName
    size_bytes: int


@lru_cache(maxsize=256)
def _has_defaults(folder: Path, _mtime_ns: int, _size: int) -> bool:
    return read_manifest(folder).defaults is not None


class Library:
    """The folder $MOEINF_HOME/models."""

    def __init__(self, settings: Settings) -> None:
        self._root = settings.models
        self._settings = settings
        self.locks = settings.run
        self.more_homes = settings.more_homes
        self._registry = Registry(settings.run)

    def folder(self, name: ModelName) -> Path:
        return self._root / name.name / name.tag

    def has(self, name: ModelName) -> bool:
        return os.path.lexists(self.folder(name) / MANIFEST)  # read_manifest reports an invalid one

    def installed(self) -> list[Installed]:
        """Return every complete or damaged model, the newest first, the damaged ones last."""
        found = []
        for place in glob.glob(f"*/*/{MANIFEST}", root_dir=self._root):  # noqa: PTH207  # a folder may vanish
            manifest = self._root / place
            folder = manifest.parent
            if not is_tag(folder.name) or folder.parent.name.startswith("."):
                continue
            name = ModelName(folder.parent.name, folder.name)
            try:
                found.append(
                    (manifest.stat().st_mtime, Installed(name, folder, read_manifest(folder)))
                )
            except (DamagedModel, OSError) as error:
                if not os.path.lexists(manifest):  # deleted meanwhile
                    continue
                found.append((0.0, Installed(name, folder, None, reason(error))))
        return [entry for _, entry in sorted(found, key=lambda pair: (-pair[0], pair[1].name))]

    def find(self, text: str) -> tuple[ModelName, Path]:
        """Return the installed model `name[:tag]` and its folder. Without a tag, use the default.

        A name of `moeinf create` needs no tag if it is there with one only.

        Raises BadName, or NoSuchModel with other tags of that name, or else the nearest names.
        """
        name = parse_name(text)
        if self.has(name):
            return name, self.folder(name)
        here = glob.glob("b*", root_dir=self.folder(name).parent)  # noqa: PTH207
        mixed = sorted(tag for tag in here if is_tag(tag) and tag not in TAGS)
        others = (ModelName(name.name, tag) for tag in (*TAGS, *mixed))
        tags = tuple(str(other) for other in others if self.has(other))
        if len(tags) == 1 and ":" not in plain(text):
            only = parse_name(tags[0])
            if self._is_created(only):  # such a name has the tag of its base
                return only, self.folder(only)
        if tags:
            raise NoSuchModel(str(name), [], tags)
        known = [entry.name for entry in self.installed()]
        near = difflib.get_close_matches(name.name, {entry.name for entry in known}, 3, 0.5)
        likely = sorted(known, key=lambda entry: entry.tag != default_tag(entry.name))
        raise NoSuchModel(text, [str(entry) for entry in likely if entry.name in near][:3])

    def _is_created(self, name: ModelName) -> bool:
        path = self.folder(name) / MANIFEST
        with suppress(OSError, DamagedModel):
            about = path.stat()
            return _has_defaults(path.parent, about.st_mtime_ns, about.st_size)
        return False

    def read(self, text: str) -> tuple[Manifest, Path]:
        """Return the manifest and the folder of a model.

        Raises as `find`, and DamagedModel and MissingDrive.
        """
        name, folder = self.find(text)
        with present(text, folder):
            manifest = read_manifest(folder)
            check_drives(folder, str(name))
        return manifest, folder

    def made_of(self, name: ModelName, source: str, revision: str | None) -> Manifest | None:
        """Return the manifest of a complete model that was made from this source and revision.

        Return None if another source made it, or if a file is missing or has another size. Without
        a revision it is always None, since the source may have changed.
        """
        folder = self.folder(name)
        try:
            manifest = read_manifest(folder)
            for file in manifest.files:
                if (folder / file.path).stat().st_size != file.size_bytes:
                    return None
        except (OSError, DamagedModel):
            return None
        made_of = (manifest.source, manifest.revision)
        same = revision is not None and made_of == (storable(source), revision)
        return manifest if same else None

    def source_of(self, name: ModelName) -> str | None:
        """Return the source of an installed model, or None if it is absent or damaged."""
        with suppress(OSError, DamagedModel):
            return read_manifest(self.folder(name)).source
        return None

    def partials(self) -> list[Partial]:
        """Return the remains of unfinished work, including pulls that still run."""
        sizes: dict[ModelName, int] = {}
        for end in (PARTIAL, OLD):
            for place in glob.glob(f"*/.*{end}", root_dir=self._root):  # noqa: PTH207
                folder = self._root / place
                name = ModelName(folder.parent.name, folder.name[1:].removesuffix(end))
                sizes[name] = sizes.get(name, 0) + taken_on_drives(folder)
        return [Partial(name, size) for name, size in sorted(sizes.items())]

    def discard(self, name: ModelName) -> bool:
        """Remove the unfinished files of a model. Return False if a pull of it is running."""
        try:
            with only_maker(self.folder(name), self.locks):
                discard(self.folder(name))
        except PullInProgress:
            return False
        return True

    def wait_for_maker(self, name: ModelName) -> None:
        """Wait until no other process is pulling the model."""
        with only_maker(self.folder(name), self.locks, wait=True):
            pass

    def check_unused(self, name: ModelName) -> None:
        """Raise ModelInUse if an engine runs the model."""
        self._check(name, self._registry.engines())

    def admit(self, work: Path, name: ModelName) -> None:
        """Install a finished folder as a model, and delete an older model of that name.

        Raises ModelInUse.
        """
        folder = self.folder(name)
        with self._registry.frozen() as engines:
            self._check(name, engines)
            old = self._put_aside(folder) if folder.exists() else None
            work.rename(folder)  # at once: until then other processes find no model
        sync_folder(folder.parent)
        if old is not None:
            remove_folder(old)

    def remove(self, text: str) -> ModelName:
        """Delete a model and its state, and return its name.

        Raises NoSuchModel, or ModelInUse while an engine runs it.
        """
        name, folder = self.find(text)
        with self._registry.frozen() as engines:
            self._check(name, engines)
            state = self._settings.state_of(name)
            shutil.rmtree(state, ignore_errors=True)  # first: it must not outlive the model
            old = self._put_aside(folder)
            sync_folder(folder.parent)
        while old.exists():
            with suppress(FileNotFoundError):  # `prune` may delete it at the same time
                remove_folder(old)
        for parent in (folder.parent, state.parent):
            with suppress(OSError):  # it may hold other tags or an unfinished pull
                parent.rmdir()
        return name

    def used(self, name: ModelName) -> None:
        """Record that a model is in use now. Write errors are ignored."""
        state = self._settings.state_of(name)
        with suppress(OSError):
            make_folder_durably(state)
            (state / _LAST_USED).touch(mode=0o600)
            os.utime(
                state / _LAST_USED, ns=(time.time_ns(),) * 2
            )  # the file system's clock is too coarse

    def last_used(self) -> ModelName:
        """Return the installed model that was used most recently. Raises NoModelUsed."""
        moments = {}
        for entry in self.installed():
            with suppress(OSError):
                used = self._settings.state_of(entry.name) / _LAST_USED
                moments[entry.name] = used.stat().st_mtime_ns
        if not moments:
            raise NoModelUsed("no model has been used yet")
        return max(moments, key=lambda name: moments[name])

    @staticmethod
    def _check(name: ModelName, engines: list[LiveEngine]) -> None:
        for engine in engines:
            if str(name) in (engine.model, engine.reads):
                raise ModelInUse(f"{name} is in use by process {engine.pid}")

    @staticmethod
    def _put_aside(folder: Path) -> Path:
        """Rename a model's folder, so that the model is gone before the slow deletion starts."""
        old = old_folder(folder)
        remove_folder(old, ignore_errors=True)
        folder.rename(old)
        return old
