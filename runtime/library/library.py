"""The models on this machine: which there are, where they lie, how one goes away.

Does not know how models are made or run.
"""

from __future__ import annotations

import difflib
import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moeinf.errors import Conflict, NotFound
from moeinf.runtime.atomic_files import sync_folder
from moeinf.runtime.config import Settings
from moeinf.runtime.library.manifest import MANIFEST, DamagedModel, Manifest, read_manifest
from moeinf.runtime.library.processes import LiveEngine, Registry
from moeinf.runtime.library.staging import (
    OLD,
    PARTIAL,
    PullInProgress,
    discard,
    old_folder,
    only_maker,
    taken_bytes,
)
from moeinf.runtime.names import TAGS, ModelName, default_tag, parse_name

_LAST_USED = "last_used"  # an empty file: its time is what counts
DEMO_CHECKPOINT = Path(__file__).parents[2] / "models" / "demo"


class NoSuchModel(NotFound, LookupError):
    """No model of that name is on this machine. tags: those of that name that are."""

    code = "model_not_found"

    def __init__(self, wanted: str, nearest: list[str], tags: tuple[str, ...] = ()) -> None:
        only = f", only {' and '.join(tags)}" if tags else ""
        super().__init__(f"there is no model {wanted!r} on this machine{only}")
        self.wanted = wanted
        self.nearest = nearest
        self.tags = tags
        self.hint = _other_names(wanted, nearest, tags)


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
    """No model was named, and no model was used before."""

    code = "no_model_used"
    hint = "`moeinf trace MODEL --dataset demo`"


@dataclass(frozen=True)
class Installed:
    """One model on this machine. manifest is None when its manifest is damaged."""

    name: ModelName
    folder: Path
    manifest: Manifest | None
    problem: str = ""


@dataclass(frozen=True)
class Partial:
    """What an unfinished pull, cp or rm has left; size_bytes is what it takes on disk."""

    name: ModelName
    size_bytes: int


class Library:
    """The folder $MOEINF_HOME/models."""

    def __init__(self, settings: Settings) -> None:
        self._root = settings.models
        self._settings = settings
        self.locks = settings.run
        self._registry = Registry(settings.run)

    def folder(self, name: ModelName) -> Path:
        return self._root / name.name / name.tag

    def has(self, name: ModelName) -> bool:
        return os.path.lexists(self.folder(name) / MANIFEST)  # reading it says what else it may be

    def installed(self) -> list[Installed]:
        """Every complete model, the newest first; damaged ones are listed as such."""
        found = []
        for manifest in self._root.glob(f"*/*/{MANIFEST}"):
            folder = manifest.parent
            if folder.name not in TAGS or folder.parent.name.startswith("."):
                continue
            name = ModelName(folder.parent.name, folder.name)
            try:
                found.append(
                    (manifest.stat().st_mtime, Installed(name, folder, read_manifest(folder)))
                )
            except (DamagedModel, OSError) as error:
                found.append((0.0, Installed(name, folder, None, str(error))))
        return [entry for _, entry in sorted(found, key=lambda pair: (-pair[0], pair[1].name))]

    def find(self, text: str) -> tuple[ModelName, Path]:
        """The model that a person means by `name[:tag]`; without a tag, it has the default one.

        Raises BadName, or NoSuchModel with other tags of that name, or else the nearest names.
        """
        name = parse_name(text)
        if self.has(name):
            return name, self.folder(name)
        others = (ModelName(name.name, tag) for tag in TAGS)
        tags = tuple(str(other) for other in others if self.has(other))
        if tags:
            raise NoSuchModel(str(name), [], tags)
        known = [entry.name for entry in self.installed()]
        near = difflib.get_close_matches(name.name, {entry.name for entry in known}, 3, 0.5)
        likely = sorted(known, key=lambda entry: entry.tag != default_tag(entry.name))
        raise NoSuchModel(text, [str(entry) for entry in likely if entry.name in near][:3])

    def read(self, text: str) -> tuple[Manifest, Path]:
        """As `find`, and its manifest. Raises DamagedModel besides."""
        _, folder = self.find(text)
        try:
            return read_manifest(folder), folder
        except FileNotFoundError as error:
            raise NoSuchModel(text, []) from error

    def made_of(self, name: ModelName, source: str, revision: str | None) -> Manifest | None:
        """The installed model, if it was made of just that and none of its files is missing.

        Without a revision nothing says that a source is still what it was: None.
        """
        folder = self.folder(name)
        try:
            manifest = read_manifest(folder)
            for file in manifest.files:
                if (folder / file.path).stat().st_size != file.size_bytes:
                    return None
        except (OSError, DamagedModel):
            return None
        same = revision is not None and (manifest.source, manifest.revision) == (source, revision)
        return manifest if same else None

    def partials(self) -> list[Partial]:
        """What is unfinished, what is going on now included."""
        sizes: dict[ModelName, int] = {}
        for end in (PARTIAL, OLD):
            for folder in self._root.glob(f"*/.*{end}"):
                name = ModelName(folder.parent.name, folder.name[1:].removesuffix(end))
                sizes[name] = sizes.get(name, 0) + taken_bytes(folder)
        return [Partial(name, size) for name, size in sorted(sizes.items())]

    def discard(self, name: ModelName) -> bool:
        """Removes what is unfinished of a model; False when it is being pulled."""
        try:
            with only_maker(self.folder(name), self.locks):
                discard(self.folder(name))
        except PullInProgress:
            return False
        return True

    def wait_for_maker(self, name: ModelName) -> None:
        """Returns when no other process is pulling the model."""
        with only_maker(self.folder(name), self.locks, wait=True):
            pass

    def check_unused(self, name: ModelName) -> None:
        """Raises ModelInUse while an engine runs the model."""
        self._check(name, self._registry.engines())

    def admit(self, work: Path, name: ModelName) -> None:
        """Gives a finished folder its name; an older model of that name goes away whole."""
        folder = self.folder(name)
        with self._registry.frozen() as engines:
            self._check(name, engines)
            old = self._put_aside(folder) if folder.exists() else None
            work.rename(folder)
        sync_folder(folder.parent)
        if old is not None:
            shutil.rmtree(old)

    def remove(self, text: str) -> ModelName:
        """Deletes a model and what using it has left. Raises NoSuchModel; ModelInUse while an
        engine runs it.
        """
        name, folder = self.find(text)
        with self._registry.frozen() as engines:
            self._check(name, engines)
            state = self._settings.state_of(name)
            shutil.rmtree(state, ignore_errors=True)  # first: it must not outlive the model
            old = self._put_aside(folder)
        while old.exists():
            with suppress(FileNotFoundError):  # `prune` may be at it, too
                shutil.rmtree(old)
        for parent in (folder.parent, state.parent):
            with suppress(OSError):  # other tags, or an unfinished pull, are in it
                parent.rmdir()
        return name

    def used(self, name: ModelName) -> None:
        """Notes that a model is being used now; a failure to write is no failure."""
        state = self._settings.state_of(name)
        with suppress(OSError):
            state.mkdir(parents=True, exist_ok=True, mode=0o700)
            (state / _LAST_USED).touch(mode=0o600)
            os.utime(
                state / _LAST_USED, ns=(time.time_ns(),) * 2
            )  # a file's own clock ticks slowly

    def last_used(self) -> ModelName:
        """The installed model that was used most recently. Raises NoModelUsed."""
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
            if engine.model == str(name):
                raise ModelInUse(f"{name} is in use by process {engine.pid}")

    @staticmethod
    def _put_aside(folder: Path) -> Path:
        """Renames, so that the model is gone at once and for good, however long deleting takes."""
        old = old_folder(folder)
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        sync_folder(folder.parent)
        return old
