"""Define `moeinf simulate`: replay recorded routing against cache policies."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeinf.cli.errors import Usage
from moeinf.cli.options import AllColumns, Json, Quiet, picture_path
from moeinf.cli.output import Output
from moeinf.cli.trace_files import Hints, hint_source, read_trace
from moeinf.cli.views.cluster_replay import (
    Burst,
    ClusterOptions,
    Conversations,
    Load,
    Replicas,
    Routers,
    Users,
    Zipf,
    cluster_document,
    cluster_picture,
    cluster_table,
)
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
from moeinf.cli.views.replay_table import columns, legend, picture, table
from moeinf.offload.policy.names import POLICY_NAMES

if TYPE_CHECKING:
    from moeinf.offload.routing.trace import Recording
    from moeinf.offload.simulator.cases import Case, OnDevice
    from moeinf.offload.simulator.clock import TimeModel
    from moeinf.offload.simulator.outcome import Outcome

_NAMES = (*POLICY_NAMES, "belady")
Policies = Annotated[str, typer.Option(metavar="A,B", help="belady, or a name of --policy.")]
Capacity = Annotated[str, typer.Option(metavar="5%,10%", help="Shares of all experts that fit.")]
Sweep = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KNOB=1,2",
        help="eamc_capacity, or a knob of adaptive or eamc: hysteresis, matches, worth, sure, "
        "step, prompt, decays (λ/λ), epsilon. Repeat for several.",
        show_default=False,
    ),
]
EamcCapacity = Annotated[
    int | None,
    typer.Option(
        min=1, help="Entries of the EAMC. Default: chosen from the workload.", show_default=False
    ),
]
Late = Annotated[bool, typer.Option(help="Report routing to the policy one pass late.")]
Interleave = Annotated[int, typer.Option(min=1, help="Number of requests that run interleaved.")]
Shift = Annotated[
    str | None,
    typer.Option(
        metavar="A,B",
        help="Replay the requests labelled A or A:…, then those of B; A+C joins labels.",
        show_default=False,
    ),
]
RamOverLink = Annotated[
    float, typer.Option(min=0.01, help="RAM bandwidth divided by link bandwidth.")
]
Seed = Annotated[int, typer.Option(help="Seed of modelled hints.")]
Plot = Annotated[
    Path | None,
    typer.Option(
        parser=picture_path, metavar="OUT.png", help="Draw a picture.", show_default=False
    ),
]


def simulate(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE…", show_default=False)],
    policies: Policies = "lru,lfu,eamc,adaptive,belady",
    capacity: Capacity = "5%,10%,20%,35%",
    device_capacity: DeviceShares = None,
    miss: Misses = None,
    bus_speed: BusSpeed = None,
    cpu_speed: CpuSpeed = None,
    device_speed: DeviceSpeed = None,
    sweep: Sweep = None,
    eamc_capacity: EamcCapacity = None,
    hints: Hints = "none",
    late: Late = False,
    interleave: Interleave = 1,
    shift: Shift = None,
    ram_over_link: RamOverLink = 8.0,
    replicas: Replicas = None,
    router: Routers = None,
    load: Load = None,
    users: Users = None,
    conversations: Conversations = None,
    zipf: Zipf = None,
    burst: Burst = None,
    seed: Seed = 0,
    plot: Plot = None,
    verbose: AllColumns = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Replay .eam and .npz recordings and route CSVs; print each policy's hits, reads and stalls.

    Example: moeinf simulate demo.eam --capacity 10%,20%
    """
    out, names, shares = (
        Output(json=json, quiet=quiet),
        _policies(policies),
        expert_shares(capacity),
    )
    cluster = ClusterOptions(replicas, router, load, users, conversations, zipf, burst)
    asked = DeviceOptions(device_capacity, miss, bus_speed, cpu_speed, device_speed)
    devices = asked.devices(late)
    from moeinf.offload.simulator.cases import Case
    from moeinf.offload.simulator.clock import TimeModel

    if cluster.given:
        alone = {"--sweep": sweep, "--device-capacity": device_capacity, "--shift": shift}
        if late or interleave > 1 or hints != "none" or any(alone.values()) or eamc_capacity:
            raise Usage("--replicas takes only --policies, --capacity, --ram-over-link and --seed")
        time = TimeModel(ram_over_link)
        documents = [
            cluster_document(path, cluster, _real(names), shares, time, seed, out)
            for path in traces
        ]
        _show_cluster(out, documents, time, plot, json)
        return
    cases = [
        Case(name, share, eamc_capacity, dict(knobs))
        for knobs in _settings(sweep or [])
        for share in shares
        for name in names
    ]
    study = _Study(cases, devices, TimeModel(ram_over_link), hints, late, seed)
    shown = columns(device_capacity is not None, verbose)
    documents = []
    for path in traces:
        documents.append(study.document(_recording(path, shift, interleave), out))
        if not json:
            table(out, documents[-1], shown)
    if json:
        out.document({"traces": documents, "time_model": study.time_model()})
    elif not quiet:
        out.fields(legend(shown, names))
    if plot is not None:
        picture(documents, plot)
        out.note(f"wrote {plot}")


def _real(names: list[str]) -> list[str]:
    """Return the policies without belady, which knows one order of requests only."""
    return [name for name in names if name != "belady"]


def _show_cluster(
    out: Output, documents: list[dict[str, Any]], time: TimeModel, plot: Path | None, json: bool
) -> None:
    if json:
        model = {"ram_over_link": time.ram_over_link, "ram_bytes_per_s": time.ram_bytes_per_s}
        out.document({"traces": documents, "time_model": model})
    else:
        for document in documents:
            cluster_table(out, document)
    if plot is not None:
        cluster_picture(documents, plot)
        out.note(f"wrote {plot}")


def _policies(text: str) -> list[str]:
    """Parse `lru,belady`. Raises Usage."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in _NAMES:
            raise Usage(f"--policies: {name!r} is invalid (expected {', '.join(_NAMES)})")
    return names


def _recording(path: Path, shift: str | None, interleave: int) -> Recording:
    """Read a trace; choose and interleave its requests as asked."""
    from moeinf.offload.simulator.cases import interleaved, shifted

    recording = read_trace(path)
    if shift is not None:
        recording = shifted(recording, shift)
    return interleaved(recording, interleave) if interleave > 1 else recording


@dataclass(frozen=True)
class _Study:
    """The cases to replay on each recording, and their conditions."""

    cases: list[Case]
    devices: list[OnDevice | None]
    clock: TimeModel
    hints: str
    late: bool
    seed: int

    def document(self, recording: Recording, out: Output) -> dict[str, Any]:
        """Replay every case on every device; return the document of the recording."""
        from moeinf.offload.simulator.cases import run_case
        from moeinf.offload.simulator.outcome import recording_document

        results = []
        passes = len(recording.passes) * len(self.cases) * len(self.devices)
        with out.counting(f"simulating {recording.name}", passes) as advance:
            for device, case in product(self.devices, self.cases):
                gate = hint_source(self.hints, recording, self.seed)
                outcome = run_case(
                    recording, case, self.clock, gate, self.late, device=device, progress=advance
                )
                results.append(_result(case, device, outcome))
        return recording_document(recording, results)

    def time_model(self) -> dict[str, Any]:
        """Return the conditions as a part of the document."""
        device = self.devices[0]
        return {
            "ram_over_link": self.clock.ram_over_link,
            "ram_bytes_per_s": self.clock.ram_bytes_per_s,
            "hints": self.hints,
            "late": self.late,
            **(device_model(device) if device is not None else {}),
        }


def _result(case: Case, device: OnDevice | None, outcome: Outcome) -> dict[str, Any]:
    return {
        "policy": case.policy,
        "capacity": case.share,
        **case.knobs,
        **(device_result(device, outcome) if device is not None else {}),
        **outcome.document(),
    }


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
