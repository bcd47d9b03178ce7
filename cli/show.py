"""`moeinf show`: what a model is."""

from __future__ import annotations

from dataclasses import asdict

from moeinf.cli.options import Json, Model, Quiet
from moeinf.cli.output import Output
from moeinf.runtime.config import read_environment
from moeinf.runtime.library import Library
from moeinf.runtime.sizes import format_bytes


def show(model: Model, json: Json = False, quiet: Quiet = False) -> None:
    """Shows a model's shape, sizes and origin.

    Example: moeinf show demo
    """
    out = Output(json=json, quiet=quiet)
    m, folder = Library(read_environment()).read(model)
    if json:
        about = {key: value for key, value in asdict(m).items() if key != "files"}
        sizes = {"size_bytes": m.size_bytes, "expert_bytes": m.slots.slot_bytes}
        memory = {"min_memory_bytes": m.slots.min_bytes, "max_memory_bytes": m.slots.max_bytes}
        out.document({**about, **sizes, **memory, "path": str(folder), "files": len(m.files)})
        return
    slots = m.slots
    out.fields(
        [
            ("model", str(m.model)),
            ("family", m.family),
            ("quantization", m.tag),
            ("context length", f"{m.max_context} tokens"),
            ("embedding length", str(m.hidden)),
            ("MoE layers", str(m.layers)),
            ("experts", f"{m.experts} per layer, {m.top_k} per token"),
            ("expert size", f"{format_bytes(slots.slot_bytes)} (intermediate {m.intermediate})"),
            ("experts in all", f"{slots.experts}, {format_bytes(slots.max_bytes)}"),
            ("dense weights", format_bytes(m.dense_bytes)),
            ("KV cache", f"{format_bytes(m.kv_bytes_per_token)} per token"),
            ("least --memory", f"{slots.min_bytes} ({format_bytes(slots.min_bytes)})"),
            ("size on disk", format_bytes(m.size_bytes)),
            ("source", m.source + (f" @ {m.revision}" if m.revision else "")),
            ("pulled", m.created_at),
            ("folder", str(folder)),
        ]
    )
