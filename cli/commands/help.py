"""Define `moeinf help`: show the help of a command."""

from __future__ import annotations

from typing import Annotated

import typer

from moeinf.cli.errors import Usage


def help_of(
    context: typer.Context,
    command: Annotated[list[str] | None, typer.Argument(metavar="[COMMAND]")] = None,
) -> None:
    """Show the help of a command, or the list of commands.

    Example: moeinf help run
    """
    assert context.parent is not None
    at = context.parent
    for word in command or ():
        group = at.command
        inner = group.get_command(at, word) if isinstance(group, typer.core.TyperGroup) else None
        if inner is None:
            raise Usage(f"there is no command {word!r}")
        at = typer.Context(inner, info_name=word, parent=at)
    typer.echo(at.get_help())
