"""Get a model by its name: the installed one, or one that is pulled first."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from moeinf.runtime.config import Settings
from moeinf.runtime.eamc.collection_file import recorded_use
from moeinf.runtime.hub.installed import installed
from moeinf.runtime.hub.resolve import find_source
from moeinf.runtime.library.library import Library, ModelInUse
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.library.repacking.repack import repack
from moeinf.runtime.library.sources import Source
from moeinf.runtime.library.staging import PullInProgress
from moeinf.runtime.names import ModelName, bits_of_tag
from moeinf.runtime.sizes import Progress

Note = Callable[[str], None]
Bars = Callable[[str], AbstractContextManager[Progress]]  # of what is made, by its name


def ensure(model: str, settings: Settings, note: Note, bars: Bars) -> tuple[Manifest, Path]:
    """Return the model's manifest and folder; pull a model that is absent and available.

    Without a tag nothing is pulled while another tag of the model is here. Raises as installed,
    find_source and repack.
    """
    found = installed(model, settings, note)
    if found is not None:
        return found
    library = Library(settings)
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
    with bars(str(name)) as progress:
        use = recorded_use(settings, name.name) if bits_of_tag(name.tag) is not None else ()
        return repack(source, Library(settings), name, progress, note, allow_nan, use, mtp)
