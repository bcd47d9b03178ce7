"""Plan a model by name, installed or not: its outlook here, other memory, and every tag."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moeinf.offload.store.budget import DoesNotFit
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.hub.resolve import can_be_had, find_source
from moeinf.runtime.jobs.plan_document import Rows, plan_document
from moeinf.runtime.library.library import Library, NoSuchModel, present
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.names import BadName, ModelName, expand, is_path, parse_name
from moeinf.runtime.placement.gpu_plan import DeviceDoesNotFit
from moeinf.runtime.placement.outlook import Machine, Outlook, PullSize, ladder, look, outlook
from moeinf.runtime.sizes import MemorySize

_UNNAMED = "checkpoint"  # the name of a folder whose own name is not a model name
Tags = dict[str, tuple[Manifest, PullSize]]


@dataclass(frozen=True)
class Planned:
    """The plan of a model.

    rungs: the same with other memory. rows: each tag that a pull can make. sizes: the provenance of
    the sizes.
    """

    found: Outlook
    rungs: list[Outlook]
    rows: Rows
    sizes: str

    def document(self) -> dict[str, Any]:
        return plan_document(self.found, self.rungs, self.rows, self.sizes)


def plan_model(
    model: str,
    config: EngineConfig,
    settings: Settings,
    note: Callable[[str], None],
    stop: threading.Event | None = None,
) -> Planned:
    """Plan an installed model, or one whose source's headers are read; load and pull nothing.

    model: may also be a folder with a checkpoint. note: receives a line per choice of a source.
    stop: ends requests to the hub. Raises NoSuchModel, DoesNotFit for a --memory below the least,
    BadContext, DeviceDoesNotFit.
    """
    tags: Tags = {}
    folder, pull = settings.models, None
    installed = None if is_path(model) else _installed(model, settings)
    if installed is not None:
        manifest, folder = installed
        sizes = "the manifest of the pulled model"
    else:
        name, tags = _prospects(model, settings, note, stop)
        manifest, pull = tags[name.tag]
        sizes = "the headers of the source; nothing was pulled"
    gone = nullcontext() if installed is None else present(manifest.model, folder)
    with gone:
        if config.draft is not None:
            from moeinf.runtime.library.draft_model import find_draft  # imports tokenizers

            source = None if installed is None else folder
            find_draft(config.draft, manifest, source, Library(settings))
        machine = look(settings, folder, manifest)
        found = outlook(manifest, config, settings, machine, pull)
        rungs = list(ladder(found, config, settings))
        rows = {tag: _row(*about, config, settings, machine) for tag, about in tags.items()}
        return Planned(found, rungs, rows, sizes)


def _installed(model: str, settings: Settings) -> tuple[Manifest, Path] | None:
    """Return an installed model, or None if it can be pulled. Raises NoSuchModel."""
    try:
        return Library(settings).read(model)
    except NoSuchModel:
        if can_be_had(model):
            return None
        raise


def _prospects(
    model: str,
    settings: Settings,
    note: Callable[[str], None],
    stop: threading.Event | None,
) -> tuple[ModelName, Tags]:
    """Return the name that a pull would give, and by tag its manifest and its sizes."""
    from moeinf.runtime.library.repacking.repack import measure_source, prospects  # imports torch

    wanted, source = find_source(model, _name_of(model), settings, note, stop=stop)
    sizes = measure_source(source)
    written = {partial.name: partial.size_bytes for partial in Library(settings).partials()}
    return wanted, {
        tag: (
            manifest,
            PullSize(
                sizes.download_bytes,
                sizes.disk_bytes[tag],
                sizes.extra_bytes,
                written.get(manifest.model, 0),
            ),
        )
        for tag, manifest in prospects(source, wanted).items()
    }


def _name_of(model: str) -> str | None:
    """Return a name for a folder whose own name is not a model name; else None."""
    if not is_path(model):
        return None
    try:
        parse_name(expand(model).name)
    except BadName:
        return _UNNAMED
    return None


def _row(
    manifest: Manifest,
    pull: PullSize,
    config: EngineConfig,
    settings: Settings,
    machine: Machine,
) -> Outlook:
    """Return the outlook of a tag; one that the given memory is too small for keeps its sizes."""
    try:
        return outlook(manifest, config, settings, machine, pull)
    except DoesNotFit as error:
        config = replace(config, memory=MemorySize(bytes=manifest.slots.min_bytes))
        lack = {"RAM": str(error)}
    except DeviceDoesNotFit as error:
        config = replace(config, device="cpu", device_memory=None)
        lack = {"GPU": str(error)}
    row = outlook(manifest, config, settings, machine, pull)
    return replace(row, problems={**row.problems, **lack}, bound=None, most=None, measured=None)
