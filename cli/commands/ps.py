"""Define `moeinf ps`: show the engines that run now, in any process."""

from __future__ import annotations

import datetime
import time
from typing import Any

from moeinf.cli.commands.list_models import ID_DIGITS, in_words
from moeinf.cli.options import Json, Quiet
from moeinf.cli.output import Output
from moeinf.runtime.config import read_environment
from moeinf.runtime.library.processes import LiveEngine, Registry
from moeinf.runtime.sizes import format_bytes

_COLUMNS = (
    "NAME", "ID", "PID", "SIZE", "PROCESSOR", "CONTEXT", "EXPERTS(GPU/RAM/DISK)", "HIT%", "UNTIL",
)  # fmt: skip


def ps(json: Json = False, quiet: Quiet = False) -> None:
    """Show which models run, where their experts are, and their hit rates.

    Example: moeinf ps --json
    """
    out = Output(json=json, quiet=quiet)
    engines = Registry(read_environment().run).engines()
    if json:
        out.document({"engines": [_as_json(engine) for engine in engines]})
    else:
        out.table(_COLUMNS, [_row(engine) for engine in engines])


def _row(engine: LiveEngine) -> list[str]:
    digest, context, experts, hits, on, above = "-", "-", "-", "-", "cpu", ""
    f = engine.figures  # None while it loads
    if f is not None:
        digest, context, on = f.digest[:ID_DIGITS], str(f.context), f.device
        experts = f"{f.device_experts}/{f.host_experts}/{f.disk_experts}"
        hits = "-" if f.hit_rate is None else f"{f.hit_rate:.1%}"
        above = f" + {format_bytes(f.device_peak_bytes)} GPU" if f.device_peak_bytes else ""
    size = format_bytes(engine.peak_bytes) + above
    where = [str(engine.pid), size, "100% CPU" if on == "cpu" else "CPU + GPU", context]
    until = None if f is None else f.expires_at
    return [engine.model, digest, *where, experts, hits, _until(until)]


def _until(expires_at: int | None) -> str:
    """Return when an engine is unloaded, worded as in Ollama; without a server, never."""
    if expires_at is None:
        return "its process ends"
    return f"{in_words(expires_at - time.time()) or 'less than a minute'} from now"


def _as_json(engine: LiveEngine) -> dict[str, Any]:
    """Return an engine's document.

    experts and bytes are null while the engine loads; expires_at is null if no server unloads it.
    """
    name, _, tag = engine.model.partition(":")
    f = engine.figures
    experts = size = expires = None
    if f is not None:
        experts = {"device": f.device_experts, "host": f.host_experts, "disk": f.disk_experts}
        size = {"device": f.device_bytes, "host": f.host_bytes, "disk": f.disk_bytes}
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
        "bytes": size,
        "peak_bytes": engine.peak_bytes,
        "device_peak_bytes": None if f is None else f.device_peak_bytes,
        "expires_at": expires,
    }
