"""Get a model by its name: the installed one, or one that is pulled first."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from moeinf.runtime.config import Settings
from moeinf.runtime.hub.resolve import DenseModel, can_be_had, find_source
from moeinf.runtime.hub.suggestions import is_dense, nearest
from moeinf.runtime.library.library import Library, ModelInUse, NoSuchModel
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.library.staging import PullInProgress
from moeinf.runtime.names import DEMO, BadName, ModelName, bits_of_tag, parse_name, plain
from moeinf.runtime.sizes import Progress

if TYPE_CHECKING:
    from moeinf.runtime.library.sources import Source

Note = Callable[[str], None]
Bars = Callable[[str], AbstractContextManager[Progress]]  # of what is made, by its name


def ensure(model: str, settings: Settings, note: Note, bars: Bars) -> tuple[Manifest, Path]:
    """Return the model's manifest and folder; pull a model that is absent and available.

    Without a tag nothing is pulled while another tag of the model is here. If there is only one, it
    is used and a note names it. NoSuchModel names several. Raises also as find_source and repack.
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
    wanted, source = find_source(model, None, settings, note)
    if library.has(wanted):  # MODEL was another spelling of it
        return library.read(str(wanted))
    try:
        make(wanted, source, settings, note, bars)
    except (ModelInUse, PullInProgress):  # another process pulls the same model
        note(f"another process is pulling {wanted}; waiting for it")
        library.wait_for_maker(wanted)
    return library.read(str(wanted))


def make(
    name: ModelName,
    source: Source,
    settings: Settings,
    note: Note,
    bars: Bars,
    allow_nan: bool = False,
    mtp: bool = True,
) -> Manifest:
    """Repack a source; notes name what is left out or rounded. Raises as repack."""
    from moeinf.runtime.eamc.collection_file import recorded_use
    from moeinf.runtime.library.repacking.repack import repack

    with bars(str(name)) as progress:
        use = recorded_use(settings, name.name) if bits_of_tag(name.tag) is not None else ()
        return repack(source, Library(settings), name, progress, note, allow_nan, use, mtp)
