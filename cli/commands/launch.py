"""Define `moeinf launch`: start a coding agent that uses the server, or print what it needs."""

from __future__ import annotations

import os
import shlex
import shutil
from typing import Annotated, Any

import typer

from moeinf.cli.chat.client import Client, ServerError
from moeinf.cli.chat.coding_clients import CLIENTS, KEY, NO_KEY, CodingClient, Needs
from moeinf.cli.chat.server_check import look
from moeinf.cli.errors import Usage
from moeinf.cli.options import Json, Quiet, installed_models
from moeinf.cli.output import Output, flush
from moeinf.errors import Unavailable
from moeinf.runtime.config import read_environment, read_server_environment
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.processes import Registry


class ClientMissing(Unavailable, RuntimeError):
    """The program of a coding agent is not installed."""

    code = "client_missing"

    def __init__(self, client: str, known: CodingClient, model: str) -> None:
        super().__init__(f"{known.program} is not installed")
        self.hint = f"`{known.install}`, or `moeinf launch {client} {model} --print`"


def _names(incomplete: str) -> list[str]:
    return [name for name in CLIENTS if name.startswith(incomplete)]


def launch(
    client: Annotated[
        str, typer.Argument(metavar="|".join(CLIENTS), show_default=False, autocompletion=_names)
    ],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL[:TAG]]", show_default=False, autocompletion=installed_models
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- ARGUMENTS…]", show_default=False, help="Arguments for the client."
        ),
    ] = None,
    show: Annotated[
        bool, typer.Option("--print", help="Print what the client needs, and start nothing.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Start a coding agent that uses the server at MOEINF_HOST, which must be running.

    Without MODEL, the model used last. The server loads it. The client gets the server's address,
    the model, its context and MOEINF_API_KEY in its environment and arguments; its own settings
    are not changed. --print and --json only print these values, for a shell or for the client's
    settings. They ask no server, so they do not know the context.

    Example: moeinf launch claude demo --print
    """
    known = CLIENTS.get(client.lower())
    if known is None:
        raise Usage(f"{client!r} is not a client (expected {', '.join(CLIENTS)})")
    out, settings = Output(json=json, quiet=quiet), read_environment()
    library, about = Library(settings), read_server_environment()
    far = not about.on_loopback  # else it may be another user's, who must not get the key
    server = Client.of(about.host, about.port, about.api_key, Registry(settings.run), far)
    if show or json:
        name = str(library.find(model)[0] if model else library.last_used())
        needs = known.needs(str(server), name, None)
        shown = f"${KEY}" if about.api_key else NO_KEY
        words = (*needs.arguments, *(arguments or ()))
        if json:
            out.document(_document(client.lower(), known, name, needs, words, shown))
        else:
            out.text(_text(known, needs, words, shown))
        return
    name = _served(server, model or str(library.last_used()), out)
    program = shutil.which(known.program)
    if program is None:
        raise ClientMissing(client.lower(), known, name)
    with out.spinner(f"loading {name}"):
        needs = known.needs(str(server), name, _context(server, name))
    out.note(f"starting {program} with {name} of the server at {server}")
    flush()
    environment = {key: value for key, value in os.environ.items() if key not in needs.without}
    environment |= _filled(needs, about.api_key or NO_KEY)
    words = (known.program, *needs.arguments, *(arguments or ()))
    os.execve(program, words, environment)  # noqa: S606  # the user asked for this program


def _served(server: Client, model: str, out: Output) -> str:
    """Return the name of a model that the server answers with. Raises ServerError."""
    found = look(server, model)
    if server.unproved and not found.silent:
        error = ServerError(f"the server at {server} is not one of this home, and gets no {KEY}")
        error.hint = "the same with --print, if you trust it"
        raise error
    if found.about is None:
        error = ServerError(found.reason or f"the server at {server} does not serve {model}")
        error.hint = "`moeinf serve`, in another terminal"
        if not found.reason:
            error.hint = f"`moeinf pull {model}`, or another model of `moeinf list`"
        raise error
    name = str(found.about["model"])
    if "tools" not in (found.about.get("capabilities") or ()):
        out.note(f"{name} calls no tools, which coding agents need to read and change files")
    return name


def _context(server: Client, model: str) -> int | None:
    """Load the model and return the tokens of its context; None: another has taken its place."""
    server.post("/api/generate", {"model": model, "stream": False})
    for one in server.ask("GET", "/api/ps", {}).get("models") or ():
        context = one.get("context_length")
        if one.get("name") == model and isinstance(context, int) and context > 0:
            return context
    return None


def _filled(needs: Needs, key: str) -> dict[str, str]:
    return {name: key if value == KEY else value for name, value in needs.environment.items()}


def _text(known: CodingClient, needs: Needs, words: tuple[str, ...], key: str) -> str:
    """Return lines for a shell, and the settings file as comments."""
    lines = [f"# {known.program}: `{known.install}`", *(f"unset {name}" for name in needs.without)]
    for name, value in _filled(needs, key).items():
        if (name, value) == (KEY, f"${KEY}"):
            continue  # it is set already
        value = f'"{value}"' if value == f"${KEY}" else shlex.quote(value)
        lines.append(f"export {name}={value}")
    lines.append(shlex.join([known.program, *words]))
    if needs.file:
        lines += [f"# Or for good, in {needs.file}:"]
        lines += [f"#   {line}".rstrip() for line in needs.content.split("\n")]
    return "\n".join(lines) + "\n"


def _document(
    client: str, known: CodingClient, model: str, needs: Needs, words: tuple[str, ...], key: str
) -> dict[str, Any]:
    return {
        "client": client,
        "model": model,
        "program": shutil.which(known.program),
        "install": known.install,
        "environment": _filled(needs, key),
        "unset": list(needs.without),
        "arguments": list(words),
        "file": needs.file or None,
        "content": needs.content or None,
    }
