"""Define `moeinf verify`: hash a model's files again, and repair the damaged ones."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeinf.cli.options import InstalledModel, Json, Quiet
from moeinf.cli.output import Output
from moeinf.runtime.config import read_environment
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.library.staging import only_maker, partial_folder
from moeinf.runtime.names import DEMO

if TYPE_CHECKING:
    from moeinf.runtime.checkpoints.checkpoint import Checkpoint
    from moeinf.runtime.library.verify import Damage, RepairSource


def verify(
    model: InstalledModel,
    repair: Annotated[
        bool, typer.Option("--repair", help="Restore damaged files from the source.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Check every file of a model against the hash recorded when it was pulled.

    Example: moeinf verify demo --repair
    """
    from moeinf.runtime.library import verify as checks  # imports torch

    out, library = Output(json=json, quiet=quiet), Library(read_environment())
    manifest, folder = library.read(model)
    with out.progress(str(manifest.model)) as progress:
        damages = checks.verify(folder, manifest, progress)
    repaired = bool(damages) and repair
    if repaired:
        with only_maker(folder, library.locks):
            aside = partial_folder(folder).with_name(f".{folder.name}.repair")
            try:
                source = _source(manifest, damages, aside)
                with out.progress(str(manifest.model)) as progress:
                    checks.repair(folder, manifest, damages, source, progress)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    if json:
        found = [{"path": d.path, "problem": d.problem} for d in damages]
        out.document({"model": str(manifest.model), "damaged": found, "repaired": repaired})
    else:
        for damage in damages:
            out.line(f"{damage.path} {damage.problem}{': repaired' if repaired else ''}")
        if not damages:
            out.line(f"{manifest.model}: {len(manifest.files)} files, all as they were pulled")
    if damages and not repaired and not json:
        out.note(f"`moeinf verify {manifest.model} --repair` restores them")
    return 1 if damages and not repaired else 0


def _source(manifest: Manifest, damages: list[Damage], aside: Path) -> RepairSource:
    """Open the model's source. Raises BadCheckpoint, RepositoryError when it is gone."""
    from moeinf.runtime.checkpoints.torch_bin import open_folder
    from moeinf.runtime.gguf.checkpoint import open_local
    from moeinf.runtime.hub.gguf_files import source_files
    from moeinf.runtime.hub.hf_cache import cached_checkpoint, lacking
    from moeinf.runtime.hub.listing import is_offline, look_up_all
    from moeinf.runtime.hub.repository import HubSource
    from moeinf.runtime.library.verify import LocalRepair

    if manifest.source == DEMO:
        return LocalRepair(open_folder(DEMO_CHECKPOINT))
    if not manifest.source.startswith("hub:"):
        return LocalRepair(_settled(open_local(Path(manifest.source)), manifest, damages))
    repository, _, quant = manifest.source.removeprefix("hub:").partition(":")
    cached = _cached_gguf(repository, quant, manifest) if quant else None
    if cached is not None:
        return LocalRepair(_settled(cached, manifest, damages))
    cached = cached_checkpoint(repository, manifest.revision) if not quant else None
    if cached is not None:
        missing = {damage.path for damage in damages}.intersection(lacking(cached.folder))
        if is_offline() or not missing:
            return LocalRepair(cached)
    everything = look_up_all(repository, manifest.revision, None, "model")
    found, found_quant = source_files(everything, quant or None, None)
    source = HubSource(found, aside, None, quant=found_quant)
    source.checkpoint = _settled(source.checkpoint, manifest, damages)
    return source


def _cached_gguf(repository: str, quant: str, manifest: Manifest) -> Checkpoint | None:
    """Return the model's GGUF file in the Hugging Face cache, or None."""
    from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint
    from moeinf.runtime.hub.hf_cache import cached_gguf

    try:
        found = cached_gguf(repository, manifest.revision, quant, None)
    except BadCheckpoint:  # the cache has others, or a part of it
        return None
    return None if found is None else found.checkpoint


def _settled(checkpoint: Checkpoint, manifest: Manifest, damages: list[Damage]) -> Checkpoint:
    """Return a GGUF checkpoint with the tokenizer of its base repository, if a repair needs it."""
    from moeinf.runtime.hub.base_repository import BaseRepository
    from moeinf.runtime.library.sources import KEPT_FILES

    if manifest.base is None or all(damage.path not in KEPT_FILES for damage in damages):
        return checkpoint
    return BaseRepository([], lambda _: None).again(checkpoint, manifest.base)
