"""`moeinf plan`: what running a model here would take, and what to expect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moeinf.cli.options import (
    Context,
    Json,
    Memory,
    Model,
    PolicyName,
    Quiet,
    Threads,
    engine_config,
)
from moeinf.cli.output import Output
from moeinf.cli.pull import ensure
from moeinf.offload.policy import DEFAULT_POLICY
from moeinf.runtime.config import EngineConfig, Settings, read_environment
from moeinf.runtime.live import Registry
from moeinf.runtime.manifest import Manifest
from moeinf.runtime.measure import measure
from moeinf.runtime.memory import available_bytes, core_count
from moeinf.runtime.plan import place, seconds_per_token
from moeinf.runtime.sizes import format_bytes
from moeinf.runtime.speeds import remembered_speed


def plan(
    model: Model,
    memory: Memory = None,
    ctx: Context = None,
    policy: PolicyName = DEFAULT_POLICY,
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Shows tiers, slots and the expected speed; loads nothing.

    Example: moeinf plan demo --memory 30%
    """
    out, settings = Output(json=json, quiet=quiet), read_environment()
    manifest, folder = ensure(model, settings, out)
    print_plan(
        manifest, folder, engine_config(settings, memory, ctx, policy, threads), settings, out
    )


def print_plan(
    manifest: Manifest, folder: Path, config: EngineConfig, settings: Settings, out: Output
) -> None:
    """The same for `plan` and for `run --dry-run`."""
    claimed = sum(engine.unfilled_bytes() for engine in Registry(settings.run).engines())
    free = available_bytes() - claimed
    placement = place(manifest, config, free, core_count())
    speeds = measure(settings, folder, manifest)
    bound = 1 / seconds_per_token(placement, manifest, speeds)
    seen = remembered_speed(settings, manifest.model, placement.slots)
    expected, how = bound, "memory traffic alone, uniformly random routing: an upper bound"
    if seen is not None:
        expected, how = seen[0], f"measured here with this --memory on {seen[1]}"
    experts = manifest.slots.experts
    on_disk = experts * manifest.slots.slot_bytes
    if out.json:
        tiers: list[dict[str, Any]] = [
            {"name": "ram", "bytes": placement.experts_bytes, "experts": placement.slots},
            {"name": "disk", "bytes": on_disk, "experts": experts},
        ]
        out.document(
            {
                "model": manifest.name,
                "tag": manifest.tag,
                "min_memory_bytes": placement.min_memory_bytes,
                "memory_bytes": placement.memory_bytes,
                "context": placement.context,
                "threads": placement.threads,
                "dense_bytes": placement.dense_bytes,
                "kv_bytes": placement.kv_bytes,
                "scratch_bytes": placement.scratch_bytes,
                "tiers": tiers,
                "expected_tokens_per_s": round(expected, 2),
                "bound_tokens_per_s": round(bound, 2),
                "provenance": {
                    "expected_tokens_per_s": how,
                    "ram_bytes_per_s": round(speeds.ram_bytes_per_s),
                    "ram": speeds.ram_provenance,
                    "disk_bytes_per_s": round(speeds.disk_bytes_per_s),
                    "disk": speeds.disk_provenance,
                    "free_bytes": free,
                },
            }
        )
        return
    size = format_bytes
    out.line(f"{manifest.model} on this machine ({size(free)} free)")
    out.fields(
        [
            ("experts in RAM", f"{placement.slots} of {experts}, {size(placement.experts_bytes)}"),
            ("experts on disk", f"{experts}, {size(on_disk)}"),
            (
                "least --memory",
                f"{placement.min_memory_bytes} ({size(placement.min_memory_bytes)})",
            ),
            ("dense weights", size(placement.dense_bytes)),
            ("KV cache", f"{size(placement.kv_bytes)} for {placement.context} tokens"),
            ("scratch", f"at most {size(placement.scratch_bytes)}"),
            ("threads", str(placement.threads)),
            ("RAM reads", f"{size(speeds.ram_bytes_per_s)}/s ({speeds.ram_provenance})"),
            ("disk reads", f"{size(speeds.disk_bytes_per_s)}/s ({speeds.disk_provenance})"),
            ("expected", f"{expected:.1f} tokens/s ({how})"),
        ]
    )
    for note in placement.notes:
        out.note(note)
