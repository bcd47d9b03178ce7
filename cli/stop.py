"""`moeinf stop`: ends the engines that run a model, in whatever process they are."""

from __future__ import annotations

from moeinf.cli.options import InstalledModel, Json, Quiet
from moeinf.cli.output import Output
from moeinf.runtime.config import read_environment
from moeinf.runtime.library import Library
from moeinf.runtime.live import Registry


class NotRunning(LookupError):
    """No engine runs the model."""


def stop(model: InstalledModel, json: Json = False, quiet: Quiet = False) -> None:
    """Ends every process that runs MODEL, and waits until it has.

    Example: moeinf stop demo
    """
    out, settings = Output(json=json, quiet=quiet), read_environment()
    name, _ = Library(settings).find(model)
    pids = Registry(settings.run).stop(str(name))
    if not pids:
        raise NotRunning(f"nothing runs {name}")
    if json:
        out.document({"model": str(name), "stopped": pids})
    else:
        out.done(f"stopped {name} (process {', '.join(map(str, pids))})")
