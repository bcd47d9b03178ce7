"""Define `moeinf cp`: give a model a second name."""

from __future__ import annotations

from typing import Annotated

import typer

from moeinf.cli.options import Json, Quiet, installed_models
from moeinf.cli.output import Output
from moeinf.runtime.config import read_environment
from moeinf.runtime.library.clone import copy_model


def cp(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE[:TAG]", show_default=False, autocompletion=installed_models),
    ],
    target: Annotated[str, typer.Argument(metavar="NEW[:TAG]", show_default=False)],
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Copy a model to a new name with hard links, which take no space.

    Example: moeinf cp demo mine
    """
    out = Output(json=json, quiet=quiet)
    name = str(copy_model(read_environment(), source, target))
    if json:
        out.document({"copied": source, "to": name})
    else:
        out.done(f"copied '{source}' to '{name}'")
