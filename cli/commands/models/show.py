"""Define `moeinf show`: describe a model."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import msgspec
import typer

from moeinf.cli.options import Json, Model, Quiet
from moeinf.cli.output import Output
from moeinf.runtime.config import read_environment
from moeinf.runtime.hub.aliases import Entry, entry_of
from moeinf.runtime.library.defaults import Defaults
from moeinf.runtime.library.library import Library, NoSuchModel
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.library.modelfile import modelfile_of, parameter_lines
from moeinf.runtime.sizes import format_bytes


def show(
    model: Model,
    modelfile: Annotated[
        bool, typer.Option("--modelfile", help="Print a Modelfile that creates the model.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show a model's shape, sizes and origin, and the defaults that `moeinf create` gave it.

    Example: moeinf show demo
    """
    out = Output(json=json, quiet=quiet)
    try:
        m, folder = Library(read_environment()).read(model)
    except NoSuchModel:
        entry = entry_of(model)
        if entry is None:
            raise
        _show_unpulled(entry, out)
        return
    if modelfile:
        text, lost = modelfile_of(m)
        for command in lost:
            out.note(f"{command} is left out: no Modelfile can hold it")
        if json:
            out.document({"modelfile": text})
        else:
            out.text(text)
        return
    if json:
        about = {key: value for key, value in msgspec.structs.asdict(m).items() if key != "files"}
        about["mtp"] = msgspec.to_builtins(m.mtp)
        about["defaults"] = msgspec.to_builtins(m.defaults)
        about["tables"] = msgspec.to_builtins(m.tables)
        about["kv_q8_bytes_per_token"] = m.kv_token_bytes("q8")
        sizes: dict[str, float] = {"size_bytes": m.size_bytes, "expert_bytes": m.slots.slot_bytes}
        sizes["expert_bits_per_weight"] = round(m.expert_bits, 4)
        memory = {"min_memory_bytes": m.slots.min_bytes, "max_memory_bytes": m.slots.max_bytes}
        out.document({**about, **sizes, **memory, "path": str(folder), "files": len(m.files)})
        return
    slots = m.slots
    usual = f", {m.usual_context} unless --ctx asks for more" if m.usual_context else ""
    out.fields(
        [
            ("model", str(m.model)),
            ("family", m.family),
            ("quantization", f"{m.tag}, {m.expert_bits:.4g} bits per weight in experts"),
            ("context length", f"{m.max_context} tokens{usual}"),
            ("embedding length", str(m.hidden_width)),
            ("MoE layers", str(m.layers)),
            ("experts", f"{m.experts} per layer, {m.top_k} per token"),
            ("expert size", f"{format_bytes(slots.slot_bytes)} (intermediate {m.intermediate})"),
            ("experts in all", f"{slots.experts}, {format_bytes(slots.max_bytes)}"),
            ("dense weights", format_bytes(m.dense_bytes)),
            ("KV cache", _kv(m)),
            ("least --memory", f"{slots.min_bytes} ({format_bytes(slots.min_bytes)})"),
            ("size on disk", format_bytes(m.size_bytes) + _of_modules(m)),
            ("source", m.source + (f" @ {m.revision}" if m.source.startswith("hub:") else "")),
            *([("drafts with", _drafting(m))] if m.mtp else []),
            *([("tokenizer", m.base.replace("@", " @ "))] if m.base else []),
            *_given(m.defaults),
            ("created" if m.defaults else "pulled", m.created_at),
            ("folder", str(folder)),
        ]
    )


def _given(defaults: Defaults | None) -> list[tuple[str, str]]:
    """Return the defaults that `moeinf create` gave a model."""
    if defaults is None:
        return []
    texts = [("system", defaults.system), ("template", defaults.template)]
    said = [(f"message of {one.role}", one.content) for one in defaults.messages]
    return [
        ("made from", defaults.base),
        *((f"parameter {name}", value) for name, value in parameter_lines(defaults)),
        *((name, text) for name, text in texts if text is not None),
        *said,
        *(("license", text) for text in defaults.licences),
    ]


def _of_modules(manifest: Manifest) -> str:
    own = manifest.modules
    return "" if own is None else f", {format_bytes(own.size_bytes)} for multi-token prediction"


def _drafting(manifest: Manifest) -> str:
    if manifest.dtype == "F32":
        return f"nothing: the tag {manifest.tag} decodes one token per pass"
    return "its layers for multi-token prediction; `--no-mtp` turns them off"


def _kv(manifest: Manifest) -> str:
    """Return the size of a request's cache and state, per token and for the longest context."""
    fixed = f"{format_bytes(manifest.state_bytes)} and " if manifest.state_bytes else ""
    whole = format_bytes(manifest.kv_bytes(manifest.max_context))
    per_token = format_bytes(manifest.kv_bytes_per_token)
    return f"{fixed}{per_token} per token; {whole} for the whole context"


def _show_unpulled(entry: Entry, out: Output) -> None:
    """Print the registry's facts about a model that is not on this machine."""
    sizes = entry.sizes()
    if out.json:
        about = {
            key: value for key, value in asdict(entry).items() if key not in ("aliases", "bits")
        }
        out.document({**about, "aliases": list(entry.aliases), "pulled": False, "sizes": sizes})
        return
    out.fields(
        [
            ("model", f"{entry.name} (not pulled: `moeinf pull {entry.name}`)"),
            ("family", entry.family),
            ("repository", f"https://huggingface.co/{entry.repo}"),
            ("revision", entry.revision or "main; a pull notes the commit"),
            ("licence", f"{entry.licence} (its repository decides)"),
            ("parameters", f"{entry.parameters:g} billion"),
            ("default tag", entry.tag),
            *((f"size as {tag}", f"about {format_bytes(size)}") for tag, size in sizes.items()),
        ]
    )
