"""Define `moeinf rm`: delete models from this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from moeinf.cli.options import Json, Quiet, installed_models
from moeinf.cli.output import Output
from moeinf.runtime.config import read_environment
from moeinf.runtime.library.library import Library


def rm(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL[:TAG]…", show_default=False, autocompletion=installed_models),
    ],
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Delete models; refuse while one is in use.

    Example: moeinf rm demo
    """
    out = Output(json=json, quiet=quiet)
    library = Library(read_environment())
    for model in models:
        library.find(model)  # all of them exist, or none is deleted
    gone = [str(library.remove(model)) for model in models]
    if json:
        out.document({"deleted": gone})
        return
    for name in gone:
        out.done(f"deleted '{name}'")
