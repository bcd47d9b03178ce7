"""Find the source of a model by its name: the hub, a folder, or the built-in demo."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from moeinf.errors import NotFound
from moeinf.models.families import family_of
from moeinf.runtime.checkpoints.checkpoint import Checkpoint
from moeinf.runtime.checkpoints.inventory import take_inventory
from moeinf.runtime.checkpoints.quantised.nvfp4 import DIVISOR, FACTOR
from moeinf.runtime.checkpoints.torch_bin import open_folder
from moeinf.runtime.config import Settings, read_other_stores
from moeinf.runtime.gguf.checkpoint import is_gguf, open_local
from moeinf.runtime.gguf.reader import stem_of
from moeinf.runtime.gguf.tags import best_tag
from moeinf.runtime.hub.aliases import entry_of
from moeinf.runtime.hub.base_repository import base_of
from moeinf.runtime.hub.gguf_files import source_files
from moeinf.runtime.hub.hf_cache import cached_checkpoint, cached_gguf, cached_snapshot, lacking
from moeinf.runtime.hub.installed import DenseModel
from moeinf.runtime.hub.listing import RepositoryError, is_offline, look_up_all
from moeinf.runtime.hub.repository import HubSource
from moeinf.runtime.hub.suggestions import is_dense, nearest
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from moeinf.runtime.library.local_stores import ollama_model, ollama_name
from moeinf.runtime.library.sources import LocalSource, Source
from moeinf.runtime.library.staging import downloads_of
from moeinf.runtime.names import (
    DEMO,
    OLLAMA,
    ModelName,
    check_not_demo,
    expand,
    is_path,
    parse_name,
    plain,
    split_quant,
)


class UnknownSource(NotFound, ValueError):
    """A name is not a short name, a repository or a path."""

    code = "unknown_source"
    exit_code = 2

    def __init__(self, model: str) -> None:
        super().__init__(
            f"{model!r} is not a short name, a repository ORG/NAME, or a path ./FOLDER"
        )
        near = ", ".join(nearest(model))
        self.hint = f"{near}, or " if near else ""
        self.hint += "`moeinf search`, which lists the short names"


def find_source(
    model: str,
    name: str | None,
    settings: Settings,
    note: Callable[[str], None],
    revision: str | None = None,
    token: str | None = None,
    workers: int = 8,
    stop: threading.Event | None = None,
    compare: bool = True,
) -> tuple[ModelName, Source]:
    """Return the name that MODEL will have, and its source.

    A `name` without a tag has that of MODEL. Once `stop` is set, every request fails with
    RepositoryError or DownloadFailed. compare: the source of a GGUF file asks the repository that
    it was made from (base_repository.py).

    Raises UnknownSource, DenseModel, BadName, RepositoryError, BadCheckpoint, DownloadFailed,
    NoSuchOllamaModel, BadStore.
    """
    if model.startswith(OLLAMA):
        path = ollama_model(model, read_other_stores())
        wanted, local = _local(path, ollama_name(model) if name is None else name)
        local.base = base_of(local.checkpoint, None, note, token, stop) if compare else None
        return wanted, local
    if is_path(model):
        wanted, local = _local(expand(model), name)
        local.base = base_of(local.checkpoint, None, note, token, stop) if compare else None
        return wanted, local
    if is_dense(model):
        raise DenseModel(model)
    asked, model = parse_name(model), plain(model)
    wanted = asked if name is None else _named(name, asked.tag)
    if asked.name == DEMO:
        return wanted, LocalSource.watched(open_folder(DEMO_CHECKPOINT), DEMO)
    check_not_demo(wanted)

    model, quant = split_quant(model)
    repository = model.partition(":")[0]
    entry = entry_of(model)
    if entry is not None:
        repository, revision = entry.repo, revision or entry.revision
        wanted = wanted if name is not None else ModelName(entry.name, asked.tag)
    elif "/" not in model:
        raise UnknownSource(model)
    given = next((text for text in (name, model) if text and ":" in plain(text)), None)
    tag = None if given is None else plain(given).rpartition(":")[2]
    try:
        if is_offline():
            return _offline(wanted, repository, revision, quant, tag, note)
        everything = look_up_all(repository, revision, token, "model", stop)
    except RepositoryError as error:
        if entry is not None:
            error.hint += f", or `moeinf show {entry.name}`, which prints what is known of it here"
        raise
    found, quant = source_files(everything, quant, tag)
    aside = downloads_of(Library(settings).folder(wanted))
    snapshot = cached_snapshot(repository, found.commit)
    source = HubSource(found, aside, token, workers, None, stop, snapshot, note, quant)
    if quant is not None and compare:
        source.base = base_of(source.checkpoint, everything.base, note, token, stop)
    if tag is None:
        wanted = _in_its_format(wanted, source.checkpoint)
        if quant is not None:
            source.move_to(downloads_of(Library(settings).folder(wanted)))
    if source.cached:
        part = "" if source.download_bytes() == 0 else f"{len(source.cached)} files of "
        note(f"{part}{repository} is in the Hugging Face cache and is used from there")
    if source.unpromised:
        names = ", ".join(source.unpromised[:3]) + (", …" if source.unpromised[3:] else "")
        note(f"the hub gives no hash of {names}: the download cannot be verified")
    return wanted, source


def _named(name: str, tag: str) -> ModelName:
    """Return a name, with this tag if it has none of its own. Raises BadName."""
    found = parse_name(name)
    return found if ":" in plain(name) else ModelName(found.name, tag)


def _local(path: Path, name: str | None) -> tuple[ModelName, LocalSource]:
    """Return the name and the source of a folder or a GGUF file. Raises BadCheckpoint, BadName."""
    asked = name if name is not None else stem_of(path.name) if is_gguf(path) else path.name
    wanted = parse_name(asked)
    check_not_demo(wanted)
    checkpoint = open_local(path)
    if ":" not in asked:
        wanted = _in_its_format(wanted, checkpoint)
    return wanted, LocalSource.watched(checkpoint, str(path))


def _in_its_format(wanted: ModelName, checkpoint: Checkpoint) -> ModelName:
    """Return the name with the tag that keeps most of a GGUF file or an NVFP4 checkpoint."""
    experts = list(checkpoint.experts.values())
    if any(name.endswith((FACTOR, DIVISOR)) for name in checkpoint.tensors):
        inventory = take_inventory(family_of(checkpoint.config), checkpoint)
        experts = [tensor for _, _, tensor in inventory.expert_matrices()]
    return ModelName(wanted.name, best_tag(experts) or wanted.tag)


def _offline(
    wanted: ModelName,
    repository: str,
    revision: str | None,
    quant: str | None,
    tag: str | None,
    note: Callable[[str], None],
) -> tuple[ModelName, Source]:
    """Return a repository in the Hugging Face cache, and the name of its model.

    Raises RepositoryError if it is absent, BadCheckpoint.
    """
    cached = cached_checkpoint(repository, revision) if quant is None else None
    found = cached_gguf(repository, revision, quant, tag) if cached is None else None
    if cached is None and found is None:
        at = f"{repository} at revision {revision}" if revision else repository
        raise RepositoryError(f"HF_HUB_OFFLINE is set and {at} is not in the Hugging Face cache")
    note(f"{repository} is in the Hugging Face cache and is used from there")
    if found is not None:
        wanted = wanted if tag is not None else _in_its_format(wanted, found.checkpoint)
        source = LocalSource(found.checkpoint, f"hub:{repository}:{found.quant}", found.commit)
        return wanted, source
    assert cached is not None
    wanted = wanted if tag is not None else _in_its_format(wanted, cached)
    if missing := lacking(cached.folder):
        note(f"the cache has no {', '.join(missing)}; it cannot be downloaded offline")
    return wanted, LocalSource(cached, f"hub:{repository}", cached.folder.name)
