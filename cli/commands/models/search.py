"""Define `moeinf search`: list the models that can be pulled by a short name."""

from __future__ import annotations

from typing import Annotated

import typer

from moeinf.cli.options import Json, Quiet
from moeinf.cli.output import Output
from moeinf.errors import NotFound
from moeinf.runtime.hub.aliases import Entry
from moeinf.runtime.hub.suggestions import matching
from moeinf.runtime.sizes import format_bytes


class NothingFound(NotFound, LookupError):
    """No short name contains the word."""

    code = "nothing_found"
    hint = "`moeinf search`, which lists all, or `moeinf pull ORG/NAME`"


def search(
    word: Annotated[str, typer.Argument(show_default=False)] = "",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List the models that can be pulled by a short name that contains WORD.

    Sizes are estimates: DISK with the default tag, DOWNLOAD as published. Any other repository of a
    supported family can be pulled as ORG/NAME.

    Example: moeinf search qwen3
    """
    out = Output(json=json, quiet=quiet)
    entries = matching(word)
    if json:
        out.document({"models": [_as_json(entry) for entry in entries]})
        return
    if not entries:
        raise NothingFound(f"no short name contains {word!r}")
    rows = [
        [
            entry.name,
            f"{entry.parameters:g}B",
            format_bytes(entry.disk_bytes),
            format_bytes(entry.download_bytes),
            entry.licence,
        ]
        for entry in entries
    ]
    out.table(["NAME", "PARAMETERS", "DISK", "DOWNLOAD", "LICENCE"], rows)


def _as_json(entry: Entry) -> dict[str, object]:
    return {
        "name": entry.name,
        "aliases": list(entry.aliases),
        "repo": entry.repo,
        "family": entry.family,
        "licence": entry.licence,
        "parameters": entry.parameters,
        "tag": entry.tag,
        "disk_bytes": entry.disk_bytes,
        "download_bytes": entry.download_bytes,
    }
