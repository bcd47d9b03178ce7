"""Plan an installed model: its outlook here, and with other memory. This file imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.hub.installed import can_be_had
from moeinf.runtime.jobs.plan_document import Rows, plan_document
from moeinf.runtime.library.draft_model import find_draft
from moeinf.runtime.library.library import Library, NoSuchModel, present
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.names import is_path
from moeinf.runtime.placement.outlook import Outlook, ladder, look, outlook


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


def plan_installed(model: str, config: EngineConfig, settings: Settings) -> Planned | None:
    """Plan a model without loading it; return None for a folder, and for one that can be pulled.

    Raises as plan_model.
    """
    installed = None if is_path(model) else _installed(model, settings)
    if installed is None:
        return None
    manifest, folder = installed
    with present(manifest.model, folder):
        if config.draft is not None:
            find_draft(config.draft, manifest, folder, Library(settings))
        found = outlook(manifest, config, settings, look(settings, folder, manifest))
        rungs = list(ladder(found, config, settings))
        return Planned(found, rungs, {}, "the manifest of the pulled model")


def _installed(model: str, settings: Settings) -> tuple[Manifest, Path] | None:
    """Return an installed model, or None if it can be pulled. Raises NoSuchModel."""
    try:
        return Library(settings).read(model)
    except NoSuchModel:
        if can_be_had(model):
            return None
        raise
