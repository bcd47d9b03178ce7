"""Define `moeinf set`: change what a running model uses."""

from __future__ import annotations

from typing import Annotated

import typer

from moeinf.cli.chat.backends import memory_words
from moeinf.cli.chat.client import Client, ServerError, serving
from moeinf.cli.commands.stop import NotRunning
from moeinf.cli.options import Json, Quiet, installed_models, memory_or_auto
from moeinf.cli.output import Output
from moeinf.runtime.config import read_environment, read_server_environment
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.processes import Registry


def set_memory(
    model: Annotated[str, typer.Argument(metavar="MODEL[:TAG]", autocompletion=installed_models)],
    memory: Annotated[
        str,
        typer.Option(
            "--memory",
            parser=memory_or_auto,  # a wrong one is told before any server is asked
            metavar="SIZE|SHARE|auto",
            help="RAM for experts: 6GiB, 50%, or auto (shrinks when free memory is low).",
        ),
    ],
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Change the memory of a model on a server. Running answers continue.

    Example: moeinf set demo --memory 50%
    """
    out, settings = Output(json=json, quiet=quiet), read_environment()
    name = str(Library(settings).find(model)[0])
    registry = Registry(settings.run)
    servers = serving(registry, name)
    if not servers:
        alone = [engine.pid for engine in registry.engines() if engine.model == name]
        if alone:
            pid = alone[0]
            raise NotRunning(f"process {pid} runs {name} without a server: `/set memory` there")
        raise NotRunning(f"no server runs {name}")
    found = []
    for server in servers:
        client = Client.at(server, read_server_environment().api_key, registry)
        try:
            found.append(client.post("/api/memory", {"model": name, "memory": memory}))
        except ServerError as error:
            raise ServerError(f"the server at {server.address}: {error}", error.said) from error
    if json:
        out.document({"model": name, "servers": found})
        return
    for said in found:
        out.done(f"{name}: {memory_words(said)}")
