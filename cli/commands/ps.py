"""Define `moeinf ps`: show the engines that run now, in any process."""

from __future__ import annotations

import datetime
import time
from typing import Annotated, Any

import typer

from moeinf.cli.commands.models.list_models import ID_DIGITS, in_words
from moeinf.cli.options import Json, Quiet
from moeinf.cli.output import Output
from moeinf.runtime.config import read_environment
from moeinf.runtime.library.library import Library, NoSuchModel
from moeinf.runtime.library.manifest import DamagedModel
from moeinf.runtime.library.processes import LiveEngine, Registry
from moeinf.runtime.sizes import format_bytes

_COLUMNS = ("NAME", "ID", "SIZE", "PROCESSOR", "CONTEXT", "UNTIL")  # as in Ollama
_MORE = ("PID", "MEMORY", "EXPERTS(GPU/RAM/DISK)", "HIT%")


def ps(
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Processes, memory, experts, hit rates.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show which models run, and until when they stay loaded.

    SIZE is the size of the model. With --verbose, MEMORY is the peak memory of its process. A line
    on stderr names each server.

    Example: moeinf ps --verbose
    """
    out, settings = Output(json=json, quiet=quiet), read_environment()
    registry = Registry(settings.run)
    engines, servers = registry.engines(), registry.servers()
    sizes = [_size(engine, Library(settings)) for engine in engines]
    if json:
        documents = map(_as_json, engines, sizes)
        listening = [{"pid": server.pid, "address": server.address} for server in servers]
        out.document({"engines": list(documents), "servers": listening})
        return
    rows = [
        _row(engine, size) + (_more(engine) if verbose else [])
        for engine, size in zip(engines, sizes, strict=True)
    ]
    out.table(_COLUMNS + (_MORE if verbose else ()), rows)
    for server in servers:
        out.note(f"process {server.pid} is the server at http://{server.address}")


def _size(engine: LiveEngine, library: Library) -> int | None:
    """Return the model's bytes on disk; None if it was removed meanwhile."""
    try:
        return library.read(engine.model)[0].size_bytes
    except (NoSuchModel, DamagedModel):
        return None


def _row(engine: LiveEngine, size: int | None) -> list[str]:
    digest, context, on = "-", "-", "cpu"
    f = engine.figures  # None while it loads
    if f is not None:
        digest, context, on = f.digest[:ID_DIGITS], str(f.context), f.device
    processor = "100% CPU" if on == "cpu" else "CPU + GPU"
    until = _until(None if f is None else f.expires_at)
    size_words = "-" if size is None else format_bytes(size)
    return [engine.model, digest, size_words, processor, context, until]


def _more(engine: LiveEngine) -> list[str]:
    experts, hits, above = "-", "-", ""
    f = engine.figures
    if f is not None:
        experts = f"{f.device_experts}/{f.host_experts}/{f.disk_experts}"
        hits = "-" if f.hit_rate is None else f"{f.hit_rate:.1%}"
        above = f" + {format_bytes(f.device_peak_bytes)} GPU" if f.device_peak_bytes else ""
    return [str(engine.pid), format_bytes(engine.peak_bytes) + above, experts, hits]


def _until(expires_at: int | None) -> str:
    """Return when an engine is unloaded, worded as in Ollama; without a server, never."""
    if expires_at is None:
        return "its process ends"
    return f"{in_words(expires_at - time.time()) or 'less than a minute'} from now"


def _as_json(engine: LiveEngine, size_bytes: int | None) -> dict[str, Any]:
    """Return an engine's document.

    experts and bytes are null while the engine loads; expires_at is null if no server unloads it.
    """
    name, _, tag = engine.model.partition(":")
    f = engine.figures
    experts = held = expires = None
    if f is not None:
        experts = {"device": f.device_experts, "host": f.host_experts, "disk": f.disk_experts}
        held = {"device": f.device_bytes, "host": f.host_bytes, "disk": f.disk_bytes}
        if f.expires_at is not None:
            expires = datetime.datetime.fromtimestamp(f.expires_at, datetime.UTC).isoformat()
    return {
        "pid": engine.pid,
        "name": name,
        "tag": tag,
        "digest": None if f is None else f.digest,
        "context": None if f is None else f.context,
        "device": "cpu" if f is None else f.device,
        "experts": experts,
        "hit_rate": None if f is None else f.hit_rate,
        "size_bytes": size_bytes,
        "bytes": held,
        "peak_bytes": engine.peak_bytes,
        "device_peak_bytes": None if f is None else f.device_peak_bytes,
        "expires_at": expires,
    }
