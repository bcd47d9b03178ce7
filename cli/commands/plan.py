"""Define `moeinf plan`: show the memory that a model needs here, and the expected speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeinf.cli.options import (
    Context,
    Device,
    DeviceMemory,
    Json,
    Memory,
    Model,
    OnMiss,
    PolicyName,
    Quiet,
    Threads,
    engine_config,
)
from moeinf.cli.output import Output
from moeinf.cli.views.gpu_plan import device_document, device_fields
from moeinf.offload.gpu_tier.miss_split import Miss
from moeinf.offload.policy.names import DEFAULT_POLICY
from moeinf.offload.store.budget import DoesNotFit
from moeinf.runtime.config import EngineConfig, Settings, read_environment
from moeinf.runtime.hub.resolve import can_be_had, find_source
from moeinf.runtime.library.library import Library, NoSuchModel
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.library.processes import Registry
from moeinf.runtime.machine.device_choice import why_unusable
from moeinf.runtime.machine.measurements import remembered_bus
from moeinf.runtime.machine.memory import available_bytes, core_count
from moeinf.runtime.placement.bandwidth import Speeds, measure
from moeinf.runtime.placement.decode_speed import remembered_speed
from moeinf.runtime.placement.gpu_plan import DeviceDoesNotFit
from moeinf.runtime.placement.plan import Placement, place, seconds_per_token
from moeinf.runtime.sizes import format_bytes

_BOUND = "memory traffic alone, uniformly random routing"
_BELOW = "RAM, bus and disk alone; the GPU's own time is not counted"
_UNKNOWN = "nearly everything is on the GPU, whose own time was not measured"


def plan(
    model: Model,
    memory: Memory = None,
    device: Device = "auto",
    device_memory: DeviceMemory = None,
    miss: OnMiss = "auto",
    ctx: Context = None,
    policy: PolicyName = DEFAULT_POLICY,
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show tiers, slots and the expected speed; load nothing, and pull nothing.

    For a model that is not pulled yet, read its headers and show every tag.

    Example: moeinf plan demo --memory 30%
    """
    out, settings = Output(json=json, quiet=quiet), read_environment()
    config = engine_config(
        settings,
        memory,
        ctx,
        policy,
        threads,
        device=device,
        device_memory=device_memory,
        miss=miss,
    )
    print_plan(model, config, settings, out)


def print_plan(model: str, config: EngineConfig, settings: Settings, out: Output) -> None:
    """Print the plan of `plan` and `run --dry-run`. Raises NoSuchModel, DoesNotFit, BadContext."""
    others: dict[str, Manifest] = {}
    try:
        manifest, folder = Library(settings).read(model)
        sizes = "the manifest of the pulled model"
    except NoSuchModel:
        if not can_be_had(model):
            raise
        manifest, others = _prospects(model, settings, out)
        folder, sizes = settings.models, "the headers of the source; nothing was pulled"
    machine = _look(settings, folder, manifest)
    found = _expect(manifest, config, settings, machine)
    rows = {tag: _try(other, config, settings, machine) for tag, other in others.items()}
    if out.json:
        out.document(_document(manifest, found, machine, sizes, rows))
    else:
        _print(manifest, found, machine, sizes, rows, out)


@dataclass(frozen=True)
class _Machine:
    """The machine that a plan is made for."""

    free_bytes: int
    cores: int
    speeds: Speeds


@dataclass(frozen=True)
class _Expected:
    """The expected speed of a model here.

    tokens_per_s   None with a GPU, whose own time was not measured
    bound          tokens per second that the traffic of RAM, bus and disk alone allows; None when
                   nearly all experts are on the GPU
    """

    placement: Placement
    disk_bytes: int
    tokens_per_s: float | None
    how: str
    bound: float | None
    miss: Miss
    bus: tuple[float, str] | None = None  # bytes per second, and the time of the measurement
    measured: bool = False  # tokens_per_s is a measurement, not the bound of memory traffic

    @property
    def notes(self) -> tuple[str, ...]:
        """Choices with reasons, and the reason why `run` would refuse. May import torch."""
        gpu = self.placement.on_device
        why = None if gpu is None else why_unusable(gpu.gpu)
        refused = () if why is None else (f"`run` would refuse: {why}",)
        return (*self.placement.notes, *self.placement.fallbacks, *refused)


def _look(settings: Settings, folder: Path, manifest: Manifest) -> _Machine:
    claimed = sum(engine.unfilled_bytes() for engine in Registry(settings.run).engines())
    speeds = measure(settings, folder, manifest)
    return _Machine(available_bytes() - claimed, core_count(), speeds)


def _prospects(model: str, settings: Settings, out: Output) -> tuple[Manifest, dict[str, Manifest]]:
    """Return the manifest that a pull would write, and that of every tag."""
    from moeinf.runtime.library.repack import prospects  # imports torch

    wanted, source = find_source(model, None, settings, out.note)
    tags = prospects(source, wanted)
    return tags[wanted.tag], tags


def _expect(
    manifest: Manifest, config: EngineConfig, settings: Settings, machine: _Machine
) -> _Expected:
    placement = place(manifest, config, machine.free_bytes, machine.cores)
    gpu = placement.on_device
    bus = None if gpu is None else remembered_bus(settings, gpu.gpu)
    speed = None if bus is None else bus[0]
    seconds = seconds_per_token(placement, manifest, machine.speeds, config.miss, speed)
    bound = 1 / seconds if seconds else None
    disk = manifest.slots.max_bytes + manifest.dense_bytes
    if gpu is not None:
        how = _UNKNOWN if bound is None else f"at most {bound:.1f} by {_BELOW}"
        return _Expected(placement, disk, None, how, bound, config.miss, bus)
    seen = remembered_speed(settings, manifest.model, placement.slots)
    if seen is None:
        return _Expected(placement, disk, bound, _BOUND, bound, config.miss)
    how = f"measured here with this --memory on {seen[1]}"
    return _Expected(placement, disk, seen[0], how, bound, config.miss, measured=True)


@dataclass(frozen=True)
class _TooBig:
    """A tag that does not fit: the least RAM that its experts need, and what is too small."""

    min_memory_bytes: int
    words: str


def _try(
    manifest: Manifest, config: EngineConfig, settings: Settings, machine: _Machine
) -> _Expected | _TooBig:
    try:
        return _expect(manifest, config, settings, machine)
    except DoesNotFit:
        return _TooBig(manifest.slots.min_bytes, "does not fit")
    except DeviceDoesNotFit:
        return _TooBig(manifest.slots.min_bytes, "does not fit the GPU")


Rows = Mapping[str, _Expected | _TooBig]


def _document(
    manifest: Manifest, found: _Expected, machine: _Machine, sizes: str, rows: Rows
) -> dict[str, Any]:
    placement, speeds, experts = found.placement, machine.speeds, manifest.slots.experts
    ram = {"name": "ram", "bytes": placement.experts_bytes, "experts": placement.slots}
    disk = {"name": "disk", "bytes": manifest.slots.max_bytes, "experts": experts}
    gpu, tiers = placement.on_device, [ram, disk]
    if gpu is not None:
        tiers.insert(0, {"name": "device", "bytes": gpu.arena_bytes, "experts": gpu.slots})
    return {
        "model": manifest.name,
        "tag": manifest.tag,
        "min_memory_bytes": placement.min_memory_bytes,
        "memory_bytes": placement.memory_bytes,
        "device": placement.device,
        "context": placement.context,
        "threads": placement.threads,
        "dense_bytes": placement.dense_bytes,
        "kv_bytes": placement.kv_bytes,
        "scratch_bytes": placement.scratch_bytes,
        "tiers": tiers,
        "device_memory": None if gpu is None else device_document(gpu, found.miss, found.bus),
        "expected_tokens_per_s": _rounded(found.tokens_per_s),
        "bound_tokens_per_s": _rounded(found.bound),
        "tags": [_row(tag, row) for tag, row in rows.items()],
        "notes": list(found.notes),
        "provenance": {
            "sizes": sizes,
            "expected_tokens_per_s": found.how,
            "ram_bytes_per_s": round(speeds.ram_bytes_per_s),
            "ram": speeds.ram_provenance,
            "disk_bytes_per_s": round(speeds.disk_bytes_per_s),
            "disk": speeds.disk_provenance,
            "free_bytes": machine.free_bytes,
        },
    }


def _row(tag: str, row: _Expected | _TooBig) -> dict[str, Any]:
    """Return a tag's row; for a tag that does not fit, only the least memory is known."""
    if isinstance(row, _TooBig):
        least = row.min_memory_bytes
        return {"tag": tag, "min_memory_bytes": least, "expected_tokens_per_s": None}
    return {
        "tag": tag,
        "disk_bytes": row.disk_bytes,
        "min_memory_bytes": row.placement.min_memory_bytes,
        "memory_bytes": row.placement.memory_bytes,
        "experts_in_ram": row.placement.slots,
        "expected_tokens_per_s": _rounded(row.tokens_per_s),
    }


def _print(
    manifest: Manifest, found: _Expected, machine: _Machine, sizes: str, rows: Rows, out: Output
) -> None:
    size, placement, speeds = format_bytes, found.placement, machine.speeds
    slots, gpu = manifest.slots, placement.on_device
    least = placement.min_memory_bytes
    out.line(f"{manifest.model} on this machine ({size(machine.free_bytes)} free)")
    out.fields(
        [
            ("sizes", sizes),
            (
                "experts in RAM",
                f"{placement.slots} of {slots.experts}, {size(placement.experts_bytes)}",
            ),
            ("experts on disk", f"{slots.experts}, {size(slots.max_bytes)}"),
            ("least --memory", f"{least} ({size(least)})"),
            *([] if gpu is None else device_fields(gpu, found.miss, found.bus)),
            ("dense weights", size(placement.dense_bytes)),
            ("KV cache", f"{size(placement.kv_bytes)} for {placement.context} tokens"),
            ("scratch", f"at most {size(placement.scratch_bytes)}"),
            ("threads", str(placement.threads)),
            ("RAM reads", f"{size(speeds.ram_bytes_per_s)}/s ({speeds.ram_provenance})"),
            ("disk reads", f"{size(speeds.disk_bytes_per_s)}/s ({speeds.disk_provenance})"),
            ("expected", f"{_speed(found)} tokens/s ({found.how})"),
        ]
    )
    if rows:
        out.line()
        lines = [_line(tag, row, slots.experts) for tag, row in rows.items()]
        out.table(["TAG", "ON DISK", "LEAST --memory", "EXPERTS IN RAM", "TOKENS/S"], lines)
    for note in found.notes:
        out.note(note)


def _line(tag: str, row: _Expected | _TooBig, experts: int) -> list[str]:
    if isinstance(row, _TooBig):
        return [tag, "-", format_bytes(row.min_memory_bytes), row.words, "-"]
    placement = row.placement
    return [
        tag,
        format_bytes(row.disk_bytes),
        format_bytes(placement.min_memory_bytes),
        f"{placement.slots} of {experts}",
        f"at most {row.bound:.1f}" if row.bound and not row.measured else _speed(row),
    ]


def _speed(row: _Expected) -> str:
    return "?" if row.tokens_per_s is None else f"{row.tokens_per_s:.1f}"


def _rounded(speed: float | None) -> float | None:
    return None if speed is None else round(speed, 2)
