"""Define `moeinf eval`: measure how well a model predicts a text, and compare two models."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from moeinf.cli.commands.models.pull import ensure
from moeinf.cli.options import (
    Json,
    Memory,
    Model,
    Quiet,
    SkipBelow,
    Threads,
    Usage,
    engine_config,
)
from moeinf.cli.output import Output
from moeinf.offload.policy.names import DEFAULT_POLICY
from moeinf.runtime.config import read_environment
from moeinf.runtime.sizes import format_bytes

_MOST_BYTES = 256 << 20  # of a text


def evaluate_text(
    model: Model,
    file: Annotated[
        Path, typer.Option(metavar="TEXT", help="A file of UTF-8 text.", show_default=False)
    ],
    against: Annotated[
        str | None,
        typer.Option(metavar="MODEL[:TAG]", help="Compare with this one.", show_default=False),
    ] = None,
    decode: Annotated[
        bool, typer.Option("--decode", help="One token per pass, as an answer; adds its speed.")
    ] = False,
    skip_below: SkipBelow = 0.0,
    memory: Memory = None,
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Print a model's perplexity on a text; with --against, how often both agree.

    The text is read in windows of at most 512 tokens; a begin-of-text token starts a new window. KL
    divergence is that of the model from the one that --against names, usually itself as bf16.
    A lossy option implies --decode and does not apply to the other model.

    Example: moeinf eval demo --file text.txt
    """
    from moeinf.runtime.engine.engine import Engine  # these import torch
    from moeinf.runtime.jobs.evaluate import WINDOW, evaluate

    out, settings = Output(json=json, quiet=quiet), read_environment()
    text = _text(file)
    config = engine_config(settings, memory, WINDOW, DEFAULT_POLICY, threads)
    lossy = replace(config, skip_below=skip_below)
    decode = decode or skip_below > 0
    with ExitStack() as opened:
        engines = [
            opened.enter_context(Engine.open(*ensure(name, settings, out), how, settings))
            for name, how in ((model, lossy), (against, config))
            if name is not None
        ]
        reference = engines[1] if against is not None else None
        score = evaluate(
            engines[0],
            reference,
            text,
            lambda tokens: out.counting(f"evaluating {model}", tokens),
            decode=decode,
        )
        notes = engines[0].take_notes()
    for note in notes:
        out.note(note)
    if json:
        out.document(
            {"model": model, "against": against, "skip_below": skip_below, **asdict(score)}
        )
        return
    rows = [("tokens", str(score.tokens)), ("perplexity", f"{score.perplexity:.4f}")]
    if score.reference_perplexity is not None:
        rows += [
            ("perplexity of the other", f"{score.reference_perplexity:.4f}"),
            ("KL divergence", f"{score.kl_divergence:.5f} nats per token"),
            ("top-1 agreement", f"{score.top1_agreement:.2%}"),
        ]
    if score.tokens_per_s is not None:
        rows += [
            ("decode rate", f"{score.tokens_per_s:.2f} tokens/s"),
            ("read", f"{format_bytes(score.bytes_read_per_token or 0)} per token"),
            ("experts skipped", f"{score.skipped_share or 0:.2%}"),
        ]
    out.fields(rows)


def _text(file: Path) -> str:
    """Read a text of bounded size. Raises Usage."""
    with file.open("rb") as source:
        data = source.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise Usage(f"--file: {file} is too large (expected at most {format_bytes(_MOST_BYTES)})")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Usage(f"--file: {file} is invalid (expected UTF-8 text)") from error
