"""`moeinf bench`: how fast a model answers here, and how far that is from what memory allows."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from moeinf.cli.options import (
    Device,
    DeviceMemory,
    Json,
    Memory,
    Model,
    Quiet,
    Threads,
    engine_config,
    policy_name,
)
from moeinf.cli.output import Output
from moeinf.cli.pull import ensure
from moeinf.offload.policy import DEFAULT_POLICY
from moeinf.runtime.config import read_environment
from moeinf.runtime.sizes import format_bytes

_COLUMNS = (
    "POLICY", "MEMORY", "FIRST TTFT", "TTFT", "TPOT", "P95", "TOKENS/S", "HIT", "READ/TOKEN",
    "STALL", "PEAK RSS", "FLOOR",
)  # fmt: skip


def bench(
    model: Model,
    memory: Memory = None,
    device: Device = "auto",
    device_memory: DeviceMemory = None,
    policies: Annotated[
        str, typer.Option(metavar="A,B", help="Policies to compare, one after the other.")
    ] = DEFAULT_POLICY,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens decoded, in each round.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="TTFT is the median of all but one.")] = 3,
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measures TTFT, TPOT, hit rate, bytes read per token, stalls, memory, and the floor.

    Example: moeinf bench demo --policies lru,adaptive --memory 30% --new-tokens 8
    """
    out, settings = Output(json=json, quiet=quiet), read_environment()
    names = [policy_name(name) for name in policies.split(",")]
    context = prompt_tokens + new_tokens
    config = engine_config(
        settings, memory, context, names[0], threads, True, device, device_memory
    )
    manifest, folder = ensure(model, settings, out)

    from moeinf.runtime import bench as measuring  # imports torch
    from moeinf.runtime.engine import Engine
    from moeinf.runtime.memory import forget_peak_rss

    runs = []
    for name in names:
        forget_peak_rss()
        with Engine(manifest, folder, replace(config, policy=name), settings) as engine:
            measured = measuring.bench(engine, prompt_tokens, new_tokens, rounds)
            runs.append(measuring.report(engine, settings, name, measured))
    if json:
        workload = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "rounds": rounds}
        about = {"model": manifest.name, "tag": manifest.tag, "machine": measuring.machine()}
        out.document({**about, "workload": workload, "runs": runs})
        return
    out.line(f"{manifest.model}, prompt of {prompt_tokens} tokens, {new_tokens} decoded")
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
        format_bytes(run["peak_rss_bytes"]),
        f"{run['floor_ms']:.2f} ms",
    ]
