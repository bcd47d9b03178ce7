"""Define `moeinf list`: list the models on this machine."""

from __future__ import annotations

import datetime
from typing import Any

from moeinf.cli.options import Json, Quiet
from moeinf.cli.output import Output
from moeinf.runtime.config import read_environment
from moeinf.runtime.library.library import Installed, Library
from moeinf.runtime.sizes import format_bytes

ID_DIGITS = 12  # of the digest, as in Ollama


def list_models(json: Json = False, quiet: Quiet = False) -> None:
    """List the models on this machine.

    BITS are the mean bits per weight of the experts.

    Example: moeinf list --json
    """
    out = Output(json=json, quiet=quiet)
    entries = Library(read_environment()).installed()
    if json:
        out.document({"models": [_as_json(entry) for entry in entries]})
        return
    rows = []
    for entry in entries:
        m = entry.manifest
        if m is None:
            problem = f"damaged: {entry.problem}"
            rows.append([str(entry.name), "-", "-", entry.name.tag, "-", problem])
        else:
            size, moment = format_bytes(m.size_bytes), _ago(m.created_at)
            bits = f"{m.expert_bits:.3g}"
            rows.append([str(entry.name), m.digest[:ID_DIGITS], size, m.tag, bits, moment])
    out.table(["NAME", "ID", "SIZE", "QUANT", "BITS", "MODIFIED"], rows)


def _as_json(entry: Installed) -> dict[str, Any]:
    m = entry.manifest
    if m is None:
        return {"name": entry.name.name, "tag": entry.name.tag, "problem": entry.problem}
    return {
        "name": m.name,
        "tag": m.tag,
        "digest": m.digest,
        "family": m.family,
        "quantization": m.tag,
        "expert_bits_per_weight": round(m.expert_bits, 4),
        "size_bytes": m.size_bytes,
        "layers": m.layers,
        "experts_per_layer": m.experts,
        "modified_at": m.created_at,
        "source": m.source,
        "revision": m.revision,
    }


def _ago(moment: str) -> str:
    """Return how long ago a moment was, in the largest unit that fits, as Ollama does."""
    try:
        then = datetime.datetime.fromisoformat(moment)
        seconds = (datetime.datetime.now(datetime.UTC) - then).total_seconds()
    except (ValueError, TypeError):
        return "-"
    span = in_words(seconds)
    return f"{span} ago" if span else "just now"


def in_words(seconds: float) -> str:
    """Return a span of time in the largest unit that fits; empty below a minute."""
    for unit, length in (("week", 604800), ("day", 86400), ("hour", 3600), ("minute", 60)):
        count = int(seconds // length)
        if count:
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return ""
