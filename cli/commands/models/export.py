"""Define `moeinf export`: write a model in the format of another program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moeinf.cli.options import InstalledModel, Json, Quiet
from moeinf.cli.output import Output
from moeinf.runtime.config import read_environment
from moeinf.runtime.library.library import Library, present
from moeinf.runtime.sizes import format_bytes


def export(
    model: InstalledModel,
    gguf: Annotated[
        Path,
        typer.Option("--gguf", metavar="FILE.gguf", help="The file to write.", show_default=False),
    ],
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a model as a GGUF file, which llama.cpp and the programs built on it run.

    Nothing is rounded: q4 becomes Q4_0, q8 Q8_0, mxfp4 MXFP4, bf16 BF16 and f32 F32. Norms, router
    gates and matrices whose rows are not whole groups of 32 become F32.

    Families that can be exported (`model_type` of config.json): arctic, deepseek_v2, deepseek_v3,
    deepseek_v32, deepseek_v4, dots1, ernie4_5_moe, exaone_moe, gemma4, glm4_moe, glm4_moe_lite,
    glm5_next, glm_moe_dsa, gpt_oss, granitemoe, granitemoehybrid, granitemoeshared, hunyuan_v1_moe,
    kimi_linear, laguna, lfm2_moe, mimo_v2_flash, minimax_m2, mistral4, mixtral, nemotron_h, olmoe,
    phimoe, qwen2_moe, qwen3_5_moe, qwen3_moe, qwen3_next, qwen4_exp, solar_open.

    Example: moeinf export demo --gguf demo.gguf
    """
    from moeinf.runtime.jobs.export_gguf import export_gguf  # imports torch

    out = Output(json=json, quiet=quiet)
    manifest, folder = Library(read_environment()).read(model)
    with present(manifest.model, folder), out.progress(str(manifest.model)) as progress:
        made = export_gguf(folder, manifest, gguf, progress, out.note, force)
    if json:
        about = {"architecture": made.architecture, "tensors": dict(made.tensors)}
        sizes = {"size_bytes": made.size_bytes}
        out.document({"model": str(manifest.model), "file": str(gguf), **about, **sizes})
    else:
        out.done(f"exported '{manifest.model}' to {gguf}, {format_bytes(made.size_bytes)}")
