"""Define `moeinf trace`: fill a model's EAMC with the prompts of a data set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeinf.cli.chat.signals import interruptible
from moeinf.cli.commands.models.pull import ensure
from moeinf.cli.errors import Usage
from moeinf.cli.options import (
    Context,
    Json,
    Memory,
    PolicyName,
    Quiet,
    Source,
    Target,
    Threads,
    engine_config,
    installed_models,
)
from moeinf.cli.output import Output
from moeinf.offload.policy.names import DEFAULT_POLICY
from moeinf.runtime.config import EngineConfig, Settings, read_environment
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import Manifest

if TYPE_CHECKING:
    from moeinf.runtime.jobs.datasets.items import Item
    from moeinf.runtime.jobs.trace_dataset import Traced

_INTERRUPTED = 130


def trace(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL[:TAG]]",
            show_default=False,
            help="Default: the model used last.",
            autocompletion=installed_models,
        ),
    ] = None,
    dataset: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="mmlu, bigbench, bbh, flan, demo, or a .jsonl, .txt or .parquet file.",
            show_default=False,
        ),
    ] = "",
    limit: Annotated[int, typer.Option(min=1, help="Most prompts to run.")] = 100,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens per answer.")] = 32,
    shots: Annotated[
        int, typer.Option(min=0, max=5, help="Solved examples before each question (mmlu).")
    ] = 5,
    subset: Annotated[
        str | None,
        typer.Option(metavar="TASK[,TASK…]", help="Only these tasks.", show_default=False),
    ] = None,
    out_file: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE.eam", help="Also write a recording for `simulate`."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed for choosing prompts and for sampling.")] = 0,
    src: Source = None,
    tgt: Target = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Send prompts without the chat template.")
    ] = False,
    memory: Memory = None,
    policy: PolicyName = DEFAULT_POLICY,
    ctx: Context = None,
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Run the prompts of a data set and record which experts they use.

    Example: moeinf trace demo --dataset demo --limit 20 --memory 30% --out demo.eam
    """
    out, settings = Output(json=json, quiet=quiet), read_environment()
    _check(dataset, out_file)
    if model is None:
        model = str(Library(settings).last_used())
        out.note(f"tracing {model}, the model used last")
    config = engine_config(settings, memory, ctx, policy, threads)
    prompts = _items(dataset, subset, limit, shots, seed, settings, out)
    manifest, folder = ensure(model, settings, out)
    done = _traced(
        manifest, folder, config, settings, out, prompts, src, tgt,
        seed=seed, max_tokens=max_tokens, raw=raw, name=dataset, out=out_file,
    )  # fmt: skip
    _print(done, str(manifest.model), dataset, out_file, out)
    return _INTERRUPTED if done.interrupted else 0


def _traced(
    manifest: Manifest, folder: Path, config: EngineConfig, settings: Settings, output: Output,
    prompts: Sequence[Item], src: str | None, tgt: str | None, **how: Any,
) -> Traced:  # fmt: skip
    """Run the prompts; how: see Model.trace."""
    from moeinf.api import Model  # imports torch
    from moeinf.runtime.generation.seq2seq import Languages

    languages = Languages(src, tgt)
    with (
        Model.of(manifest, folder, config, settings, languages) as model,
        interruptible() as stopped,
    ):
        with output.counting(f"tracing {manifest.model}", len(prompts)) as advance:
            done = model.trace(prompts, stopped=stopped, advance=advance, **how)
        for note in model.engine.take_notes():
            output.note(note)
    return done


def _check(dataset: str, out_file: Path | None) -> None:
    if not dataset:
        raise Usage("name the prompts: --dataset demo, mmlu, bigbench, bbh, flan or a FILE")
    if out_file is not None and out_file.suffix != ".eam":
        raise Usage(f"--out: {out_file} is invalid (expected a file named *.eam)")


def _items(
    dataset: str, subset: str | None, limit: int, shots: int, seed: int, settings: Settings,
    out: Output,
) -> list[Item]:  # fmt: skip
    """Load the prompts; with `subset`, only those of its tasks."""
    from moeinf.runtime.jobs.datasets.items import Wanted
    from moeinf.runtime.jobs.datasets.table import load_items
    from moeinf.runtime.library.library import DEMO_CHECKPOINT

    tasks = tuple(word.strip() for word in subset.split(",")) if subset is not None else None
    wanted = Wanted(limit=limit, subset=tasks, shots=shots, seed=seed)
    with out.progress(dataset) as progress:
        heldout = DEMO_CHECKPOINT / "heldout.jsonl"
        return load_items(dataset, wanted, settings.datasets, heldout, progress)


def _print(done: Traced, model: str, dataset: str, out_file: Path | None, out: Output) -> None:
    if out.json:
        out.document(
            {
                "model": model,
                "dataset": dataset,
                "requests": done.requests,
                "skipped": done.skipped,
                "prompt_tokens": done.prompt_tokens,
                "tokens": done.tokens,
                "hit_rate": None if done.hit_rate is None else round(done.hit_rate, 4),
                "eamc": {"entries": done.entries, "capacity": done.capacity},
                "out": None if out_file is None else str(out_file),
                "interrupted": done.interrupted,
            }
        )
        return
    if done.interrupted:
        out.line(f"interrupted: what {done.requests} requests used is kept")
    hits = "-" if done.hit_rate is None else f"{done.hit_rate:.1%} (decode)"
    pairs = [
        ("requests", f"{done.requests} of {dataset}"),
        ("tokens", f"{done.prompt_tokens} of prompts, {done.tokens} answered"),
        ("expert hit rate", hits),
        ("EAMC", f"{done.entries} of {done.capacity} entries"),
    ]
    if done.skipped:
        pairs.insert(1, ("skipped", f"{done.skipped}, longer than the context"))
    if out_file is not None:
        pairs.append(("recording", str(out_file)))
    out.fields(pairs)
