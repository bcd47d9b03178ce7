"""Define `moeinf pull`: put a model on this machine, its experts repacked one per file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeinf.cli.errors import Usage
from moeinf.cli.options import Json, Quiet, known_models
from moeinf.cli.output import Output
from moeinf.runtime.config import Settings, read_environment, read_other_stores
from moeinf.runtime.hub.installed import installed
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.local_stores import LocalModel, local_models
from moeinf.runtime.library.manifest import Manifest, storable
from moeinf.runtime.names import LEAST_BITS, MOST_BITS, TAGS, ModelName, bits_of_tag, bits_tag
from moeinf.runtime.sizes import format_bytes

if TYPE_CHECKING:
    from moeinf.runtime.library.sources import Source

Revision = Annotated[
    str | None, typer.Option(metavar="NAME", help="Branch, tag or commit.", show_default=False)
]
Token = Annotated[
    str | None,
    typer.Option(metavar="TOKEN", help="For the hub; default: HF_TOKEN.", show_default=False),
]


def pull(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL[:TAG] | ORG/NAME[:TAG] | ./PATH | ollama:NAME",
            show_default=False,
            autocompletion=known_models,
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME[:TAG]", help="The model's name.", show_default=False)
    ] = None,
    revision: Revision = None,
    token: Token = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Concurrent downloads.")] = 8,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be fetched and written.")
    ] = False,
    bits: Annotated[
        float | None,
        typer.Option(
            min=LEAST_BITS,
            max=MOST_BITS,
            metavar="B",
            show_default=False,
            help="Mean bits per weight; chooses a format for each matrix. The tag is bB.",
        ),
    ] = None,
    allow_nan: Annotated[
        bool, typer.Option("--allow-nan", help="Continue if weights are NaN or infinite.")
    ] = False,
    no_base: Annotated[
        bool,
        typer.Option("--no-base", help="Do not contact the repository that a GGUF file names."),
    ] = False,
    no_mtp: Annotated[
        bool,
        typer.Option("--no-mtp", help="Leave out the layers of multi-token prediction."),
    ] = False,
    list_local: Annotated[
        bool,
        typer.Option("--list-local", help="List files of Ollama, LM Studio and llama.cpp."),
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fetch a model from the hub, or read a checkpoint folder, and repack its experts.

    MODEL is a short name (mixtral, deepseek-v2-lite, olmoe, …), a Hugging Face repository, a local
    folder or GGUF file, a model of Ollama on this machine (ollama:NAME), or demo.
    hf.co/ORG/NAME-GGUF:Q4_K_M is a GGUF file on the hub. TAG is q4 (the default), q4k, q4d8 (q4,
    but the experts' down_proj in q8), q5k, q6k, q8, q3 and q2 (experts in 3 or 2 bits), bf16 (the
    default of demo), f32, or what the checkpoint has: mxfp4, nvfp4. Without a tag, a GGUF file
    keeps its own types where it can, and NVFP4 is kept. The tokenizer and chat template come from
    the repository that a GGUF file names, and some rows are compared with it, unless
    HF_HUB_OFFLINE is set or --no-base is given. An interrupted pull resumes where it stopped; a
    model that is up to date is left unchanged. --bits chooses q8, q4, q3, q2 or a K type for each
    matrix, from its weights and the recorded use of its experts.

    Families that run (`model_type` of config.json): arctic, deepseek_v2, deepseek_v3, deepseek_v32,
    deepseek_v4, dots1, ernie4_5_moe, exaone_moe, gemma4, gemma4_text, glm4_moe, glm4_moe_lite,
    glm4v_moe, glm4v_moe_text, glm5_next, glm5_next_text, glm_moe_dsa, gpt_oss, granitemoe,
    granitemoehybrid, granitemoeshared, hunyuan_v1_moe, kimi_k2, kimi_k25, kimi_linear, laguna,
    lfm2_moe, mimo_v2_flash, minimax_m2, mistral3, mistral4, mixtral, nemotron_h, nllb-moe, olmoe,
    phimoe, qwen2_moe, qwen3_5_moe, qwen3_5_moe_text, qwen3_moe, qwen3_next, qwen4_exp,
    qwen4_exp_text, solar_open, switch_transformers.

    Example: moeinf pull olmoe:q4
    """
    out, settings = Output(json=json, quiet=quiet), read_environment()
    if list_local:
        _print_local(out)
        return
    if model is None:
        raise Usage("MODEL is missing: a short name, ORG/NAME, ./PATH or ollama:NAME")
    tag = None if bits is None else _tag_of(bits)
    from moeinf.runtime.hub.resolve import find_source  # these modules import torch
    from moeinf.runtime.jobs.ensure import make

    wanted, source = find_source(
        model, name, settings, out.note, revision, token, workers, None, not no_base
    )
    if tag is not None:
        wanted = _with_tag(wanted, model if name is None else name, tag)
    if dry_run:
        _print_sizes(wanted, source, out, not no_mtp)
        return
    library = Library(settings)
    manifest = library.made_of(wanted, source.origin, source.revision)
    if manifest is not None and not (no_mtp and manifest.mtp):
        out.note(f"{wanted} is up to date")
    else:
        before = library.source_of(wanted)
        if before not in (None, storable(source.origin)):
            out.note(f"{wanted} was made from {before}; this pull replaces it")
        manifest = make(wanted, source, settings, out.note, out.progress, allow_nan, not no_mtp)
    if json:
        sizes = {"size_bytes": manifest.size_bytes, "files": len(manifest.files)}
        about = {"source": manifest.source, "revision": manifest.revision}
        out.document({"name": manifest.name, "tag": manifest.tag, **about, **sizes})
    else:
        out.note(f"{manifest.model}: {format_bytes(manifest.size_bytes)}, success")


def ensure(model: str, settings: Settings, out: Output) -> tuple[Manifest, Path]:
    """Return the model's manifest and folder; pull a model that is absent and available.

    Raises as jobs.ensure.
    """
    found = installed(model, settings, out.note)
    if found is not None:
        return found
    from moeinf.runtime.jobs.ensure import ensure as ensure_model  # imports torch

    return ensure_model(model, settings, out.note, out.progress)


def _tag_of(bits: float) -> str:
    """Return the tag of --bits. Raises Usage unless it has at most two decimals."""
    tag = bits_tag(bits)
    if bits_of_tag(tag) != bits:
        raise Usage(f"--bits {bits:.12g} is invalid (expected at most two decimals)")
    return tag


def _with_tag(wanted: ModelName, text: str, tag: str) -> ModelName:
    """Return the name with the tag of --bits. Raises Usage where the text has another tag."""
    if text.lower().endswith(f":{wanted.tag}") and wanted.tag != tag:
        raise Usage(f"--bits: {text} has the tag {wanted.tag}, not {tag}")
    return ModelName(wanted.name, tag)


def _print_local(out: Output) -> None:
    models = local_models(read_other_stores())
    if out.json:
        out.document({"models": [_as_json(model) for model in models]})
        return
    rows = []
    for model in models:
        size = f"damaged: {model.problem}" if model.path is None else format_bytes(model.size_bytes)
        path = "" if model.path is None or str(model.path) == model.name else str(model.path)
        rows.append([model.name, size, model.store, path])
    out.table(["MODEL", "SIZE", "STORE", "FILE"], rows)
    if not models:
        out.note("no GGUF file of Ollama, LM Studio or llama.cpp is on this machine")


def _as_json(model: LocalModel) -> dict[str, str | int]:
    about: dict[str, str | int] = {"name": model.name, "store": model.store}
    if model.path is None:
        return about | {"problem": model.problem}
    return {**about, "size_bytes": model.size_bytes, "path": str(model.path)}


def _print_sizes(name: ModelName, source: Source, out: Output, mtp: bool) -> None:
    from moeinf.runtime.library.repacking.repack import measure_source

    sizes = measure_source(source, mtp)
    if out.json:
        out.document(
            {
                "name": name.name,
                "tag": name.tag,
                "source": source.origin,
                "revision": source.revision,
                "files": [{"name": n, "size_bytes": size} for n, size in sizes.files],
                "download_bytes": sizes.download_bytes,
                "disk_bytes": sizes.disk_bytes,
                "extra_disk_bytes": sizes.extra_bytes,
            }
        )
        return
    out.table(["SOURCE FILE", "SIZE"], [[n, format_bytes(size)] for n, size in sizes.files])
    out.line()
    on_disk = [
        [str(ModelName(name.name, tag)), format_bytes(sizes.disk_bytes[tag])]
        for tag in TAGS
        if tag in sizes.disk_bytes
    ]
    out.table(["MODEL", "ON DISK"], on_disk)
    out.line()
    out.fields(
        [
            ("to download", format_bytes(sizes.download_bytes)),
            ("on the way", f"{format_bytes(sizes.extra_bytes)} more while it is repacked"),
        ]
    )
