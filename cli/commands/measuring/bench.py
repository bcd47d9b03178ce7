"""Define `moeinf bench`: measure a model's speed here, and the floor that memory sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeinf.cli.commands.models.pull import ensure
from moeinf.cli.errors import Usage
from moeinf.cli.options import (
    AllColumns,
    Device,
    DeviceMemory,
    Experts,
    Json,
    KvForm,
    Memory,
    Model,
    OnMiss,
    Quiet,
    Route,
    SkipBelow,
    Threads,
    engine_config,
    policy_name,
)
from moeinf.cli.output import Output
from moeinf.cli.trace_files import Hints, hint_source, read_trace
from moeinf.cli.views.bench_table import show
from moeinf.offload.policy.names import DEFAULT_POLICY
from moeinf.runtime.config import EngineConfig, Settings, read_environment
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.sizes import format_bytes

if TYPE_CHECKING:
    from moeinf.offload.routing.trace import Recording
    from moeinf.runtime.jobs.forced_routing import Request

Policies = Annotated[
    str, typer.Option(metavar="A,B", help="Policies to compare, one after the other.")
]
PromptTokens = Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")]
NewTokens = Annotated[int, typer.Option(min=1, help="Tokens decoded, in each round.")]
Rounds = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Rounds; TTFT is the median without the first. Default: 3; 1 with --replay.",
        show_default=False,
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="TRACE",
        help="Use the routing of this recording instead of the model's own.",
        show_default=False,
    ),
]
Requests = Annotated[
    int | None,
    typer.Option(
        "--requests",
        min=1,
        metavar="N",
        help="Replay the recording's first N requests.",
        show_default=False,
    ),
]


def bench(
    model: Model,
    memory: Memory = None,
    device: Device = "auto",
    device_memory: DeviceMemory = None,
    miss: OnMiss = "auto",
    policies: Policies = DEFAULT_POLICY,
    skip_below: SkipBelow = 0.0,
    route: Route = None,
    experts: Experts = None,
    kv: KvForm = None,
    prompt_tokens: PromptTokens = 128,
    new_tokens: NewTokens = 64,
    rounds: Rounds = None,
    replay: Trace = None,
    take: Requests = None,
    hints: Hints = "none",
    threads: Threads = None,
    verbose: AllColumns = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure TTFT, TPOT, hit rate, bytes read per token, stalls, memory, and the bound set by RAM.

    Example: moeinf bench demo --policies lru,adaptive --memory 30% --new-tokens 8
    """
    out, settings = Output(json=json, quiet=quiet), read_environment()
    names = [policy_name(name) for name in policies.split(",")]
    recording = _recording(replay, hints, take)
    if recording is not None and route:
        raise Usage("--route cannot be combined with --replay: a replay forces the routing")
    manifest, folder = ensure(model, settings, out)
    load = _workload(manifest, recording, take, prompt_tokens, new_tokens, rounds, hints)
    traced = recording is None  # forced routing is not the model's own
    config = engine_config(
        settings,
        memory,
        load.context,
        names[0],
        threads,
        trace=traced,
        device=device,
        device_memory=device_memory,
        miss=miss,
        skip_below=skip_below,
        cache_aware=route or 0.0,
        experts=experts,
        kv=kv,
    )
    configs = [replace(config, policy=name) for name in names]
    runs = [_run(manifest, folder, one, settings, load, out) for one in configs]
    for note in dict.fromkeys(note for run in runs for note in run["notes"]):
        out.note(note)
    _print(manifest, load, runs, verbose, out)


def _recording(replay: Path | None, hints: str, take: int | None) -> Recording | None:
    """Read the trace of --replay, or return None. Raises Usage for options that need a replay."""
    if replay is None and hints != "none":
        raise Usage("--hints needs --replay: without it the model's own gates give hints")
    if replay is None and take is not None:
        raise Usage("--requests needs --replay")
    return None if replay is None else read_trace(replay)


@dataclass(frozen=True)
class _Workload:
    """The passes of each engine. recording: the routing to force; None: the model's own."""

    prompt_tokens: int
    new_tokens: int
    rounds: int
    hints: str
    context: int
    recording: Recording | None
    requests: Sequence[Request]

    @property
    def passes(self) -> int:
        each = sum(len(one.passes) for one in self.requests)
        return self.rounds * (each or 1 + self.new_tokens)


def _workload(
    manifest: Manifest, recording: Recording | None, take: int | None, prompt_tokens: int,
    new_tokens: int, rounds: int | None, hints: str,
) -> _Workload:  # fmt: skip
    """Build the workload; fit a recording to the model. Raises OtherShape."""
    if recording is None:
        context = prompt_tokens + new_tokens
        return _Workload(prompt_tokens, new_tokens, rounds or 3, hints, context, None, ())

    from moeinf.runtime.jobs.forced_routing import first_requests, fitted, requests  # imports torch

    fit = first_requests(fitted(recording, manifest), take)
    found, decoded = requests(fit), fit.decode_tokens
    context = max(request.tokens for request in found)
    return _Workload(fit.tokens - decoded, decoded, rounds or 1, hints, context, fit, found)


def _run(
    manifest: Manifest, folder: Path, config: EngineConfig, settings: Settings, load: _Workload,
    out: Output,
) -> dict[str, Any]:  # fmt: skip
    """Measure one engine and return its report."""
    from moeinf.runtime.engine.engine import Engine
    from moeinf.runtime.jobs import bench as measuring  # imports torch
    from moeinf.runtime.machine.memory import forget_peak_rss

    forget_peak_rss()
    with Engine.open(manifest, folder, config, settings) as engine:
        with out.counting(f"{config.policy}: passes of {manifest.model}", load.passes) as advance:
            if load.recording is None:
                measured = measuring.bench(
                    engine, load.prompt_tokens, load.new_tokens, load.rounds, advance
                )
            else:
                source = hint_source(load.hints, load.recording)
                measured = measuring.bench_replay(
                    engine, load.requests, source, load.rounds, advance
                )
        notes = engine.take_notes()
        return measuring.report(engine, settings, measured) | {"notes": notes}


def _print(
    manifest: Manifest, load: _Workload, runs: list[dict[str, Any]], verbose: bool, out: Output
) -> None:
    recording = load.recording
    if out.json:
        from moeinf.runtime.jobs.bench import machine

        workload: dict[str, Any] = {
            "prompt_tokens": load.prompt_tokens,
            "new_tokens": load.new_tokens,
            "rounds": load.rounds,
            "replay": None if recording is None else recording.name,
            "requests": None if recording is None else len(load.requests),
            "hints": load.hints,
        }
        what = {"model": manifest.name, "tag": manifest.tag, "machine": machine()}
        out.document({**what, "workload": workload, "runs": runs})
        return
    about = "" if recording is None else f", routed as {recording.name} (hints: {load.hints})"
    out.prose(
        f"{manifest.model}, prompt of {load.prompt_tokens} tokens, {load.new_tokens} decoded, "
        f"{format_bytes(runs[0]['memory_bytes'])} for experts{about}"
    )
    show(out, runs, verbose)
