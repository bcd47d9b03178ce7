"""Define `moeinf stop`: unload a model from every process, or end all engines and servers."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from moeinf.cli.chat.client import Client, ServerError, serving
from moeinf.cli.errors import Usage
from moeinf.cli.options import Json, Quiet, installed_models
from moeinf.cli.output import Output
from moeinf.errors import NotFound
from moeinf.runtime.config import read_environment, read_server_environment
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.processes import LiveServer, NotStopped, Registry

_UNLOAD_S = 15.0
_LOOK_EVERY_S = 0.1


class NotRunning(NotFound, LookupError):
    """No engine runs the model."""

    code = "not_running"
    hint = "`moeinf ps`, which shows what runs"


def stop(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL[:TAG]", show_default=False, autocompletion=installed_models),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="End every engine and every server.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Unload MODEL. A server keeps its other models; a `moeinf run` process ends.

    Example: moeinf stop demo
    """
    out, settings = Output(json=json, quiet=quiet), read_environment()
    registry = Registry(settings.run)
    if (model is None) != everything:
        raise Usage("give a model, or --all")
    if model is None:
        name, unloaded, pids = None, [], registry.stop()
        if not pids:
            raise NotRunning("nothing runs")
    else:
        name = str(Library(settings).find(model)[0])
        key = read_server_environment().api_key
        unloaded = serving(registry, name)
        for server in unloaded:
            _unload(registry, server, name, key)
        pids = registry.stop(name)
        if not (pids or unloaded):
            raise NotRunning(f"{name} is not running")
    addresses = [server.address for server in unloaded]
    if json:
        out.document({"model": name, "stopped": pids, "unloaded": addresses})
        return
    words = [f"unloaded by the server at {address}" for address in addresses]
    words += [f"process {', '.join(map(str, pids))}"] if pids else []
    out.done(f"stopped {name or 'everything'} ({', '.join(words)})")


def _unload(registry: Registry, server: LiveServer, model: str, api_key: str | None) -> None:
    """Make a server unload a model, and return when it has. Raises ServerError, NotStopped.

    The request is repeated while the engine lives: an engine that is loading cannot be unloaded.
    """
    client = Client.at(server, api_key, registry)
    deadline = time.monotonic() + _UNLOAD_S
    while server in serving(registry, model):
        left = deadline - time.monotonic()
        if left <= 0:
            raise NotStopped(server.pid, _UNLOAD_S)
        try:
            client.post("/api/generate", {"model": model, "keep_alive": 0}, left)
        except TimeoutError:
            continue
        except ServerError as error:
            raise ServerError(f"the server at {server.address}: {error}", error.said) from error
        time.sleep(_LOOK_EVERY_S)
