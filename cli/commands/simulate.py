"""Define `moeinf simulate`: replay recorded routing against cache policies."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from moeinf.cli.options import Json, Quiet, Usage, picture_path
from moeinf.cli.output import Output
from moeinf.cli.trace_files import Hints, hint_source, read_trace
from moeinf.cli.views.gpu_replay import (
    BusSpeed,
    CpuSpeed,
    DeviceOptions,
    DeviceShares,
    DeviceSpeed,
    Misses,
    device_model,
    device_result,
    expert_shares,
)
from moeinf.cli.views.replay_table import picture, table
from moeinf.offload.policy.names import POLICY_NAMES


def simulate(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE…", show_default=False)],
    policies: Annotated[
        str, typer.Option(metavar="A,B", help="lru, lfu, eamc, adaptive, belady.")
    ] = "lru,lfu,eamc,adaptive,belady",
    capacity: Annotated[
        str, typer.Option(metavar="5%,10%", help="Shares of all experts that fit.")
    ] = "5%,10%,20%,35%",
    device_capacity: DeviceShares = None,
    miss: Misses = None,
    bus_speed: BusSpeed = None,
    cpu_speed: CpuSpeed = None,
    device_speed: DeviceSpeed = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KNOB=1,2",
            help="eamc_capacity, or a knob of adaptive or eamc: hysteresis, matches, worth, sure, "
            "step, prompt, decays (λ/λ), epsilon. Repeat for several.",
            show_default=False,
        ),
    ] = None,
    eamc_capacity: Annotated[
        int | None,
        typer.Option(
            min=1, help="Requests remembered. Default: by the workload.", show_default=False
        ),
    ] = None,
    hints: Hints = "none",
    late: Annotated[bool, typer.Option(help="Routing reaches the policy one pass late.")] = False,
    interleave: Annotated[int, typer.Option(min=1, help="Requests served in turn.")] = 1,
    shift: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="First the requests labelled A, then B; A+C joins labels.",
            show_default=False,
        ),
    ] = None,
    ram_over_link: Annotated[float, typer.Option(min=0.01, help="RAM ÷ link bandwidth.")] = 8.0,
    seed: Annotated[int, typer.Option(help="Seed of modelled hints.")] = 0,
    plot: Annotated[
        Path | None,
        typer.Option(parser=picture_path, metavar="OUT.png", help="A picture.", show_default=False),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Replay .eam recordings and route CSVs; print each policy's hits, reads and stalls.

    Example: moeinf simulate demo.eam --capacity 10%,20%
    """
    out = Output(json=json, quiet=quiet)
    names = [name.strip() for name in policies.split(",")]
    for name in names:
        if name not in (*POLICY_NAMES, "belady"):
            raise Usage(
                f"--policies: {name!r} is invalid (expected {', '.join((*POLICY_NAMES, 'belady'))})"
            )
    shares = expert_shares(capacity)
    asked = DeviceOptions(device_capacity, miss, bus_speed, cpu_speed, device_speed)
    devices = asked.devices(late)
    from moeinf.offload.simulator.cases import Case, interleaved, run_case, shifted
    from moeinf.offload.simulator.clock import TimeModel

    clock = TimeModel(ram_over_link)
    documents = []
    for path in traces:
        recording = read_trace(path)
        if shift is not None:
            recording = shifted(recording, shift)
        if interleave > 1:
            recording = interleaved(recording, interleave)
        results: list[dict[str, Any]] = []
        cases = [
            Case(name, share, eamc_capacity, dict(knobs))
            for knobs in _settings(sweep or [])
            for share in shares
            for name in names
        ]
        passes = len(recording.passes) * len(cases) * len(devices)
        with out.counting(f"simulating {recording.name}", passes) as advance:
            for device, case in product(devices, cases):
                gate = hint_source(hints, recording, seed)
                outcome = run_case(
                    recording, case, clock, gate, late, device=device, progress=advance
                )
                results.append(
                    {
                        "policy": case.policy,
                        "capacity": case.share,
                        **case.knobs,
                        **(device_result(device, outcome) if device is not None else {}),
                        "hit_rate": round(outcome.hit_rate, 5),
                        "reads_per_token": round(outcome.reads_per_token, 3),
                        "bytes_read_per_token": round(outcome.bytes_read_per_token),
                        "insertions_per_token": round(outcome.insertions_per_token, 3),
                        "stall_ms_per_token": outcome.stall_ms_per_token,
                        "prefetch_precision": outcome.prefetch_precision,
                        "prefetch_recall": outcome.prefetch_recall,
                    }
                )
        shape = recording.shape
        documents.append(
            {
                "name": recording.name,
                "layers": shape.layers,
                "experts": shape.experts,
                "top_k": shape.top_k,
                "tokens": recording.decode_tokens,
                "lru_cliff_capacity": shape.layers * shape.top_k / (shape.layers * shape.experts),
                "results": results,
            }
        )
        if not json:
            table(out, documents[-1])
    model = {
        "ram_over_link": clock.ram_over_link,
        "ram_bytes_per_s": clock.ram_bytes_per_s,
        "hints": hints,
        "late": late,
        **(device_model(devices[0]) if devices[0] is not None else {}),
    }
    if json:
        out.document({"traces": documents, "time_model": model})
    if plot is not None:
        picture(documents, plot)
        out.note(f"wrote {plot}")


def _settings(sweep: list[str]) -> list[dict[str, Any]]:
    """Return every combination of the swept knobs. Raises Usage."""
    settings: list[dict[str, Any]] = [{}]
    for text in sweep:
        name, separator, values = text.partition("=")
        if not separator:
            raise Usage(f"--sweep: {text!r} is invalid (expected KNOB=VALUE,VALUE)")
        parsed = [_value(name, value) for value in values.split(",")]
        settings = [{**one, name: value} for one in settings for value in parsed]
    return settings


def _value(name: str, text: str) -> Any:
    try:
        if (name, text) == ("eamc_capacity", "auto"):
            return None
        if name in ("eamc_capacity", "matches"):
            if (count := int(text)) < 1:
                raise Usage(f"--sweep: {name} must be at least 1, got {text}")
            return count
        if name == "decays":
            return tuple(float(part) for part in text.split("/"))
        return float(text)
    except Usage:
        raise
    except ValueError as error:
        raise Usage(f"--sweep: {name}={text} is invalid (expected a number)") from error
