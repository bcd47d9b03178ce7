"""`moeinf bench`: how fast a model answers here, and how far that is from what memory allows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from moeinf.cli.commands.pull import ensure
from moeinf.cli.options import (
    Device,
    DeviceMemory,
    Json,
    Memory,
    Model,
    OnMiss,
    Quiet,
    Threads,
    Usage,
    engine_config,
    policy_name,
)
from moeinf.cli.output import Output
from moeinf.cli.trace_files import Hints, hint_source, read_trace
from moeinf.offload.policy.names import DEFAULT_POLICY
from moeinf.runtime.config import read_environment
from moeinf.runtime.sizes import format_bytes

_COLUMNS = (
    "POLICY", "MEMORY", "FIRST TTFT", "TTFT", "TPOT", "P95", "TOKENS/S", "HIT", "READ/TOKEN",
    "STALL", "HINTED", "PREDICTED", "AHEAD USED", "DECIDING", "PEAK RSS", "FLOOR",
)  # fmt: skip


def bench(
    model: Model,
    memory: Memory = None,
    device: Device = "auto",
    device_memory: DeviceMemory = None,
    miss: OnMiss = "auto",
    policies: Annotated[
        str, typer.Option(metavar="A,B", help="Policies to compare, one after the other.")
    ] = DEFAULT_POLICY,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens decoded, in each round.")] = 64,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="TTFT is the median of all but one. Default: 3; 1 of a replay.",
            show_default=False,
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="TRACE",
            help="Force this recorded routing onto the model, instead of a text's.",
            show_default=False,
        ),
    ] = None,
    take: Annotated[
        int | None,
        typer.Option(
            "--requests",
            min=1,
            metavar="N",
            help="Replay the recording's first N requests.",
            show_default=False,
        ),
    ] = None,
    hints: Hints = "none",
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measures TTFT, TPOT, hit rate, bytes read per token, stalls, memory, and the CPU's floor.

    Example: moeinf bench demo --policies lru,adaptive --memory 30% --new-tokens 8
    """
    out, settings = Output(json=json, quiet=quiet), read_environment()
    names = [policy_name(name) for name in policies.split(",")]
    recording = None if replay is None else read_trace(replay)
    if recording is None and hints != "none":
        raise Usage("--hints are those of a --replay; else the model's own gates are asked")
    if recording is None and take is not None:
        raise Usage("--requests are those of a --replay")
    manifest, folder = ensure(model, settings, out)

    from moeinf.runtime.engine.engine import Engine
    from moeinf.runtime.jobs import bench as measuring  # imports torch
    from moeinf.runtime.jobs.forced_routing import first_requests, fitted, requests
    from moeinf.runtime.machine.memory import forget_peak_rss

    context, passes = prompt_tokens + new_tokens, []
    if recording is not None:
        recording = first_requests(fitted(recording, manifest), take)
        passes = requests(recording)
        context = max(request.tokens for request in passes)
        new_tokens = recording.decode_tokens
        prompt_tokens = recording.tokens - new_tokens
    rounds = rounds or (3 if recording is None else 1)
    steps = rounds * (sum(len(one.passes) for one in passes) or 1 + new_tokens)
    traced = recording is None  # forced routing is not the model's
    config = engine_config(
        settings, memory, context, names[0], threads, traced, device, device_memory, miss
    )
    runs = []
    for name in names:
        forget_peak_rss()
        with Engine.open(manifest, folder, replace(config, policy=name), settings) as engine:
            with out.counting(f"{name}: passes of {manifest.model}", steps) as advance:
                if recording is None:
                    measured = measuring.bench(engine, prompt_tokens, new_tokens, rounds, advance)
                else:
                    source = hint_source(hints, recording)
                    measured = measuring.bench_replay(engine, passes, source, rounds, advance)
            notes = engine.take_notes()
            runs.append(measuring.report(engine, settings, measured) | {"notes": notes})
    for note in dict.fromkeys(note for run in runs for note in run["notes"]):
        out.note(note)
    if json:
        workload: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "new_tokens": new_tokens,
            "rounds": rounds,
            "replay": None if recording is None else recording.name,
            "requests": None if recording is None else len(passes),
            "hints": hints,
        }
        what = {"model": manifest.name, "tag": manifest.tag, "machine": measuring.machine()}
        out.document({**what, "workload": workload, "runs": runs})
        return
    about = "" if recording is None else f", routed as {recording.name} (hints: {hints})"
    out.line(f"{manifest.model}, prompt of {prompt_tokens} tokens, {new_tokens} decoded{about}")
    out.table(_COLUMNS, [_row(run) for run in runs])


def _row(run: dict[str, Any]) -> list[str]:
    hit = run["hit_rate"]
    return [
        run["policy"],
        format_bytes(run["memory_bytes"]),
        f"{run['first_ttft_ms']:.0f} ms",
        f"{run['ttft_ms']:.0f} ms",
        f"{run['tpot_ms_median']:.2f} ms",
        f"{run['tpot_ms_p95']:.2f} ms",
        f"{run['tokens_per_s']:.1f}",
        "-" if hit is None else f"{hit:.1%}",
        format_bytes(run["bytes_read_per_token"]),
        f"{run['stall_share']:.1%}",
        *_foresight(run),
        format_bytes(run["peak_rss_bytes"]),
        "-" if run["floor_ms"] is None else f"{run['floor_ms']:.2f} ms",
    ]


def _foresight(run: dict[str, Any]) -> list[str]:
    """Shares of hits by cause, share used of what was read ahead, and what deciding took."""
    hits = max(1, sum(run["hits"].values()))
    used = run["prefetch_accuracy"]
    return [
        *(f"{run['hits'][cause] / hits:.1%}" for cause in ("hinted", "predicted")),
        "-" if used is None else f"{used:.0%}",
        f"{run['policy_us_per_token']:.0f} us",
    ]
