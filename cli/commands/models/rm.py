"""Define `moeinf rm`: delete models from this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moeinf.cli.chat.client import Client, ServerError, serving
from moeinf.cli.options import Json, Quiet, installed_models
from moeinf.cli.output import Output
from moeinf.offload.format.drives import places_away
from moeinf.runtime.config import read_environment, read_server_environment
from moeinf.runtime.library.library import Library, ModelInUse
from moeinf.runtime.library.processes import Registry

_REMOVE_S = 60.0


def rm(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL[:TAG]…", show_default=False, autocompletion=installed_models),
    ],
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Delete models, unless one is in use.

    A server that has an idle model loaded unloads it first.

    Example: moeinf rm demo
    """
    out = Output(json=json, quiet=quiet)
    settings = read_environment()
    library, registry = Library(settings), Registry(settings.run)
    names = [str(library.find(model)[0]) for model in models]  # all exist, or none is deleted
    gone, left = [], list[Path]()
    for name in names:
        left += places_away(library.find(name)[1])
        if not _removed_by_server(name, registry):
            library.remove(name)
        gone.append(name)
    for place in left:
        out.note(f"{place} is on a drive that is missing: delete it there")
    if json:
        out.document({"deleted": gone})
        return
    for name in gone:
        out.done(f"deleted '{name}'")


def _removed_by_server(model: str, registry: Registry) -> bool:
    """Let the server that has the model loaded delete it; return False if none has.

    Raises ModelInUse while the model answers a request, ServerError.
    """
    servers = serving(registry, model)
    if not servers:
        return False
    client = Client.at(servers[0], read_server_environment().api_key, registry)
    try:
        client.ask("DELETE", "/api/delete", {"model": model}, _REMOVE_S)
    except ServerError as error:
        if error.said == ModelInUse.code:
            raise ModelInUse(str(error)) from error
        raise
    except ConnectionError:  # it has just ended
        return False
    return True
