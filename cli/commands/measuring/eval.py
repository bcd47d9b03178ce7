"""Define `moeinf eval`: measure how well a model predicts a text, and compare two models."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeinf.cli.commands.models.pull import ensure
from moeinf.cli.errors import Usage
from moeinf.cli.options import (
    Experts,
    Json,
    KvForm,
    Memory,
    Model,
    Quiet,
    Route,
    SkipBelow,
    Threads,
    engine_config,
)
from moeinf.cli.output import Output
from moeinf.offload.policy.names import DEFAULT_POLICY
from moeinf.runtime.config import EngineConfig, lossy_options, read_environment
from moeinf.runtime.files.regular import open_regular
from moeinf.runtime.sizes import format_bytes

if TYPE_CHECKING:
    from moeinf.runtime.jobs.evaluate import Speed

_MOST_BYTES = 256 << 20  # of a text


def evaluate_text(
    model: Model,
    file: Annotated[
        Path, typer.Option(metavar="TEXT", help="A file of UTF-8 text.", show_default=False)
    ],
    against: Annotated[
        str | None,
        typer.Option(metavar="MODEL[:TAG]", help="Compare with this model.", show_default=False),
    ] = None,
    decode: Annotated[
        bool,
        typer.Option("--decode", help="Read one token per pass, as in decoding; adds the speed."),
    ] = False,
    skip_below: SkipBelow = 0.0,
    route: Route = None,
    experts: Experts = None,
    kv: KvForm = None,
    memory: Memory = None,
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Print a model's perplexity on a text; with --against, how often both agree.

    The text is read in windows of at most 512 tokens; a begin-of-text token starts a new window. KL
    divergence is that of the model from the one that --against names, usually itself as bf16.
    A lossy option implies --decode. It and --kv q8 do not apply to the other model: without
    --against that is the same model.

    Example: moeinf eval demo --file text.txt --memory 30% --route cache-aware=0.2
    """
    from moeinf.runtime.engine.engine import Engine  # these import torch
    from moeinf.runtime.jobs.evaluate import WINDOW, evaluate

    out, settings = Output(json=json, quiet=quiet), read_environment()
    text = _text(file)
    config = replace(engine_config(settings, memory, WINDOW, DEFAULT_POLICY, threads), kv="full")
    lossy = replace(
        config,
        skip_below=skip_below,
        cache_aware=route or 0.0,
        q2_on_miss=experts,
        kv=kv or settings.kv,
    )
    decode = decode or bool(lossy.lossy)
    if lossy != config:
        against = against or model
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
        lossy_or_null = dict(lossy.lossy) or None
        about = {"model": model, "against": against, "lossy": lossy_or_null, "kv": lossy.kv}
        out.document({**about, **asdict(score)})
        return
    rows = [("tokens", str(score.tokens), "")]
    rows += [("perplexity", f"{score.perplexity:.4f}", _or_nothing(score.reference_perplexity))]
    if score.kl_divergence is not None:
        rows += [
            ("KL divergence", f"{score.kl_divergence:.5f} nats per token", ""),
            ("top-1 agreement", f"{score.top1_agreement:.2%}", ""),
        ]
    if score.speed is not None:
        speeds = [score.speed, score.reference_speed]
        rows += list(zip(_SPEEDS, *map(_speed_words, speeds), strict=True))
    if against is None:
        out.fields([(name, value) for name, value, _ in rows])
    else:
        out.table(("", _title(model, lossy), _title(against, config)), rows)


_SPEEDS = (
    "decode rate",
    "hit rate",
    "read",
    "experts skipped",
    "experts rerouted",
    "experts in q2",
)


def _speed_words(speed: Speed | None) -> list[str]:
    """Return what is shown for each of _SPEEDS."""
    if speed is None:
        return [""] * len(_SPEEDS)
    shares = (speed.hit_rate, speed.skipped_share, speed.rerouted_share, speed.low_share)
    hits, *others = ("-" if share is None else f"{share:.2%}" for share in shares)
    read = f"{format_bytes(speed.bytes_read_per_token)} per token"
    return [f"{speed.tokens_per_s:.2f} tokens/s", hits, read, *others]


def _title(model: str, config: EngineConfig) -> str:
    kv = [] if config.kv == "full" else [f"--kv {config.kv}"]
    return " ".join([model, *lossy_options(config.lossy), *kv])


def _or_nothing(perplexity: float | None) -> str:
    return "" if perplexity is None else f"{perplexity:.4f}"


def _text(file: Path) -> str:
    """Read a text of bounded size. Raises Usage."""
    with os.fdopen(open_regular(file), "rb") as source:
        data = source.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise Usage(f"--file: {file} is too large (expected at most {format_bytes(_MOST_BYTES)})")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Usage(f"--file: {file} is invalid (expected UTF-8 text)") from error
