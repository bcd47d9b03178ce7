"""Find an installed model by its name, or tell whether an absent one can be pulled.

This file imports no torch: `moeinf run` reads it before it knows whether a server answers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from moeinf.errors import NotFound
from moeinf.runtime.config import Settings
from moeinf.runtime.hub.aliases import entry_of
from moeinf.runtime.hub.suggestions import fitting, is_dense, nearest
from moeinf.runtime.library.library import Library, NoSuchModel
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.machine.memory import available_bytes
from moeinf.runtime.names import DEMO, BadName, parse_name, plain
from moeinf.runtime.sizes import format_bytes


class DenseModel(NotFound, ValueError):
    """The named model has no experts."""

    code = "dense_model"
    exit_code = 2

    def __init__(self, model: str) -> None:
        super().__init__(f"{model} is a dense model; moeinf runs mixture-of-experts models")
        found = fitting(available_bytes())
        fit = (f"`moeinf run {e.name}` ({format_bytes(e.disk_bytes)})" for e in found)
        self.hint = f"{' or '.join(fit)}, or `moeinf search`"


def can_be_had(model: str) -> bool:
    """Return whether a name is the demo, ORG/NAME or a short name. Raises BadName."""
    own = parse_name(model).name == DEMO
    return own or "/" in plain(model) or entry_of(model) is not None or is_dense(model)


def installed(
    model: str, settings: Settings, note: Callable[[str], None]
) -> tuple[Manifest, Path] | None:
    """Return an installed model's manifest and folder, or None for one that can be pulled.

    Without a tag, another tag of the model is used if only one is here, and a note names it.
    NoSuchModel names several. Raises also BadName, DenseModel.
    """
    library = Library(settings)
    try:
        return library.read(model)
    except BadName:
        if is_dense(model):  # with a tag of Ollama's
            raise DenseModel(model) from None
        raise
    except NoSuchModel as error:
        another = ":" not in plain(model) and parse_name(model).name != DEMO
        if another and len(error.tags) == 1:
            note(f"{plain(model)}: only {error.tags[0]} is on this machine")
            return library.read(error.tags[0])
        if (another and error.tags) or not can_be_had(model):
            raise NoSuchModel(error.wanted, [*error.nearest, *nearest(model)], error.tags) from None
    return None
