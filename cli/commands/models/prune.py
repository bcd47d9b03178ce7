"""Define `moeinf prune`: remove what unfinished pulls, copies and removals have left."""

from __future__ import annotations

from typing import Annotated

import typer

from moeinf.cli.options import Json, Quiet
from moeinf.cli.output import Output
from moeinf.runtime.config import read_environment
from moeinf.runtime.library.library import Library
from moeinf.runtime.sizes import format_bytes


def prune(
    list_partials: Annotated[
        bool, typer.Option("--list-partials", help="Only print what would be removed.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Remove unfinished pulls, except those in progress.

    Example: moeinf prune --list-partials
    """
    out = Output(json=json, quiet=quiet)
    library = Library(read_environment())
    partials = library.partials()
    if not list_partials:
        partials = [partial for partial in partials if library.discard(partial.name)]
    if json:
        entries = [{"name": str(p.name), "size_bytes": p.size_bytes} for p in partials]
        out.document({"partials": entries, "removed": not list_partials})
        return
    if list_partials:
        rows = [[str(p.name), format_bytes(p.size_bytes)] for p in partials]
        out.table(["UNFINISHED", "SIZE"], rows)
        return
    for partial in partials:
        out.done(f"removed the unfinished '{partial.name}', {format_bytes(partial.size_bytes)}")
