"""`moeinf pull`: puts a model on this machine, its experts repacked one per file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moeinf.cli.options import Json, Quiet, Usage
from moeinf.cli.output import Output
from moeinf.runtime.config import Settings, read_environment
from moeinf.runtime.library import DEMO, DEMO_CHECKPOINT, Library
from moeinf.runtime.manifest import Manifest
from moeinf.runtime.names import ModelName, expand, is_path, parse_name
from moeinf.runtime.sizes import format_bytes


def pull(
    model: Annotated[str, typer.Argument(metavar="MODEL[:TAG] | ./FOLDER", show_default=False)],
    name: Annotated[
        str | None, typer.Option(metavar="NAME[:TAG]", help="What to call it.", show_default=False)
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Repacks a local checkpoint folder (families: olmoe, mixtral, deepseek_v2), or the demo.

    TAG is bf16 (the default) or f32.
    """
    out = Output(json=json, quiet=quiet)
    settings = read_environment()
    if is_path(model):
        folder = expand(model)
        wanted = parse_name(name if name is not None else folder.name)
    else:
        wanted = parse_name(name if name is not None else model)
        if parse_name(model).name != DEMO:
            raise Usage(
                f"{model!r}: only local checkpoint folders can be pulled yet; "
                "give a path such as ./folder"
            )
        folder = DEMO_CHECKPOINT
    manifest = pull_folder(folder, wanted, settings, out)
    if json:
        sizes = {"size_bytes": manifest.size_bytes, "files": len(manifest.files)}
        out.document({"name": manifest.name, "tag": manifest.tag, **sizes})
    else:
        out.note(f"{manifest.model}: {format_bytes(manifest.size_bytes)}, success")


def pull_folder(folder: Path, name: ModelName, settings: Settings, out: Output) -> Manifest:
    """Repacks with a progress bar; notes on stderr say what is left out or rounded."""
    from moeinf.runtime.checkpoint import open_checkpoint  # these import torch
    from moeinf.runtime.repack import Origin, repack

    checkpoint = open_checkpoint(folder)
    origin = Origin(DEMO if folder == DEMO_CHECKPOINT else str(folder))
    with out.progress(f"repacking {name}") as progress:
        return repack(checkpoint, Library(settings), name, origin, progress, out.note)


def ensure(model: str, settings: Settings, out: Output) -> tuple[Manifest, Path]:
    """The model's manifest and folder; the demo is repacked when it is not there yet."""
    library = Library(settings)
    name = parse_name(model)
    if name.name == DEMO and not library.has(name):
        pull_folder(DEMO_CHECKPOINT, name, settings, out)
        return library.read(str(name))
    return library.read(model)
