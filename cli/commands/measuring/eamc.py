"""Define `moeinf eamc`: show, export, import and clear a model's EAM collection."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeinf.cli.errors import Usage
from moeinf.cli.options import InstalledModel, Json, Quiet, picture_path
from moeinf.cli.output import Output
from moeinf.runtime.config import read_environment
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import Manifest

if TYPE_CHECKING:
    from moeinf.offload.routing.clustering import Summary
    from moeinf.runtime.eamc.collection_file import EamcState

eamc = typer.Typer(
    help="Show, export, import or clear the EAMC: the experts that past requests used.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
_SIZES_SHOWN = 12
_BOUNDS = {
    "matching": "what a token can afford to be matched with",
    "memory": "64 MiB of memory",
}
File = Annotated[Path, typer.Argument(metavar="FILE", show_default=False)]


@eamc.command("show")
def show(
    model: InstalledModel,
    plot: Annotated[
        Path | None,
        typer.Option(
            parser=picture_path, metavar="FILE.png", help="Draw the heat map.", show_default=False
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show how many requests the EAMC holds, which groups they form, and which experts they use.

    Example: moeinf eamc show demo
    """
    from moeinf.cli.views.heatmap import draw, terminal_lines
    from moeinf.offload.routing.clustering import summarise

    out = Output(json=json, quiet=quiet)
    manifest, state = _open(model, out)
    summary = summarise(state.load())
    if plot is not None:
        if not summary.entries:
            raise Usage(f"--plot: the EAMC of {manifest.model} is empty")
        draw(summary, f"EAMC of {manifest.model}", plot)
    figures = _figures(manifest, summary, state.capacity)
    if json:
        heat = [[round(float(share), 6) for share in row] for row in summary.heat]
        out.document({**figures, "heat": heat, "plot": None if plot is None else str(plot)})
        return
    out.fields(_words(figures))
    if summary.entries:
        out.line()
        for line in terminal_lines(summary.heat, out.console.width):
            out.line(line)
    else:
        out.note(f"`moeinf run {manifest.model}` and `moeinf trace` fill it")
    if plot is not None:
        out.note(f"drawn: {plot}")


@eamc.command("export")
def export(model: InstalledModel, file: File, json: Json = False, quiet: Quiet = False) -> None:
    """Write the collection to a file, which `import` reads on any machine.

    Example: moeinf eamc export demo requests.eam
    """
    from moeinf.runtime.eamc.collection_file import export_eamc

    out = Output(json=json, quiet=quiet)
    manifest, state = _open(model, out)
    found = state.load()
    export_eamc(found, file)
    _report(out, manifest, "exported", len(found), len(found), file)


@eamc.command("import")
def import_(model: InstalledModel, file: File, json: Json = False, quiet: Quiet = False) -> None:
    """Add the requests of an exported file to the collection.

    Example: moeinf eamc import demo requests.eam
    """
    from moeinf.runtime.eamc.collection_file import import_eamc

    out = Output(json=json, quiet=quiet)
    manifest, state = _open(model, out)
    found = import_eamc(file, manifest)
    held = state.extend(found.entries())
    _report(out, manifest, "imported", len(found), held, file)


@eamc.command("clear")
def clear(model: InstalledModel, json: Json = False, quiet: Quiet = False) -> None:
    """Remove all requests of a model from its collection.

    Example: moeinf eamc clear demo
    """
    out = Output(json=json, quiet=quiet)
    manifest, state = _open(model, out)
    _report(out, manifest, "cleared", state.clear(), 0, None)


def _open(model: str, out: Output) -> tuple[Manifest, EamcState]:
    from moeinf.runtime.eamc.collection_file import EamcState

    settings = read_environment()
    manifest, _ = Library(settings).read(model)
    return manifest, EamcState(settings, manifest, out.note)


def _report(
    out: Output, manifest: Manifest, did: str, count: int, held: int, file: Path | None
) -> None:
    if out.json:
        about = {"model": str(manifest.model), did: count, "entries": held}
        out.document(about if file is None else {**about, "file": str(file)})
        return
    there = "" if did == "cleared" else f"; the EAMC of {manifest.model} holds {held}"
    out.done(f"{did} {count} {'entry' if count == 1 else 'entries'}{there}")


def _figures(manifest: Manifest, summary: Summary, capacity: int) -> dict[str, object]:
    """Return the document of `show --json`, without the heat map."""
    import numpy as np

    from moeinf.offload.routing.clustering import nearest
    from moeinf.offload.routing.eamc import ALIKE, MOST_ENTRIES

    per_token = manifest.layers * manifest.top_k
    near = nearest(summary.similarity) if summary.entries > 1 else np.zeros(0, np.float32)
    return {
        "model": str(manifest.model),
        "entries": summary.entries,
        "capacity": capacity,
        "capacity_limit": "matching" if capacity == MOST_ENTRIES else "memory",
        "alike": ALIKE,
        "layers": manifest.layers,
        "experts_per_layer": manifest.experts,
        "prompt_tokens": summary.prompt_events // per_token,
        "decode_tokens": summary.decode_events // per_token,
        "experts_used_per_request": round(summary.used_by_one, 4),
        "experts_used": round(summary.used_by_all, 4),
        "groups": [
            {"entries": size, "cohesion": round(cohesion, 4)}
            for size, cohesion in zip(summary.groups.sizes, summary.groups.cohesion, strict=True)
        ],
        "silhouette": round(summary.groups.silhouette, 4),
        "nearest": {
            "median": round(float(np.median(near)), 4) if len(near) else None,
            "least": round(float(near.min()), 4) if len(near) else None,
        },
    }


def _words(figures: dict[str, object]) -> list[tuple[str, str]]:
    pairs = [
        ("model", f"{figures['model']}"),
        ("entries", f"{figures['entries']} of at most {figures['capacity']}"),
        (
            "capacity",
            f"grows while requests differ: cosines below {figures['alike']}",
        ),
        ("bounded by", _BOUNDS[str(figures["capacity_limit"])]),
    ]
    if not figures["entries"]:
        return pairs
    groups, near = figures["groups"], figures["nearest"]
    assert isinstance(groups, list)
    assert isinstance(near, dict)
    tokens = f"{figures['prompt_tokens']} of prompts, {figures['decode_tokens']} decoded"
    one, everything = figures["experts_used_per_request"], figures["experts_used"]
    pairs += [
        ("tokens", tokens),
        ("experts used", f"{one:.1%} by a request, {everything:.1%} by all"),
    ]
    if near["median"] is not None:
        text = f"cosine {near['median']:.3f} in the median, {near['least']:.3f} at least"
        pairs.append(("nearest other", text))
    if len(groups) > 1:
        sizes = ", ".join(str(group["entries"]) for group in groups[:_SIZES_SHOWN])
        sizes += ", …" if len(groups) > _SIZES_SHOWN else ""
        how = f"k-means by cosine, silhouette {figures['silhouette']}"
        pairs.append(("groups", f"{len(groups)}, of {sizes} requests ({how})"))
    else:
        pairs.append(("groups", "no distinct groups"))
    return pairs
