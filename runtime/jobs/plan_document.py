"""Return the document of `moeinf plan --json` and `/api/plan`, its verdict and its remedy.

docs/schemas/plan.json describes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moeinf.offload.gpu_tier.miss_split import Miss
from moeinf.runtime.hub.suggestions import fitting
from moeinf.runtime.placement.decode_speed import MeasuredSpeed
from moeinf.runtime.placement.gpu_plan import DevicePlacement
from moeinf.runtime.placement.outlook import Outlook
from moeinf.runtime.sizes import format_bytes

Rows = Mapping[str, Outlook]  # by tag
Bus = tuple[float, str]  # bytes per second, and the time of the measurement

_BOUND = "a bound: memory traffic alone, uniformly random routing"
_BELOW = "a bound: RAM, bus and disk alone; the GPU's own time is not counted"
_UNKNOWN = "nearly everything is on the GPU, whose own time was not measured"
_UNMEASURED = "not measured"


def plan_document(
    found: Outlook, rungs: Sequence[Outlook], rows: Rows, sizes: str
) -> dict[str, Any]:
    """Return the document. sizes: the provenance of the sizes."""
    manifest, placement, gpu = found.manifest, found.placement, found.placement.on_device
    return {
        "model": manifest.name,
        "tag": manifest.tag,
        "verdict": verdict(found),
        "runs": not found.problems,
        "problems": found.problems,
        "try": remedy(found, rows),
        "min_memory_bytes": placement.min_memory_bytes,
        "memory_bytes": placement.memory_bytes,
        "device": placement.device,
        "context": placement.context,
        "threads": placement.threads,
        "dense_bytes": placement.dense_bytes,
        "kv": placement.kv,
        "kv_bytes": placement.kv_bytes,
        "scratch_bytes": placement.scratch_bytes,
        "prefix_bytes": placement.prefix_bytes,
        "table_bytes": placement.table_bytes,
        "draft_bytes": placement.draft_bytes,
        "needed_ram_bytes": placement.peak_bytes,
        "disk_bytes": found.model_bytes,
        "extra_disk_bytes": 0 if found.pull is None else found.pull.extra_bytes,
        "download_bytes": 0 if found.pull is None else found.pull.download_bytes,
        "machine": _machine(found),
        "tiers": _tiers(found),
        "device_memory": None if gpu is None else device_document(gpu, found.miss, found.bus),
        "expected_tokens_per_s": _measured(found.measured),
        "bound_tokens_per_s": _rounded(found.bound),
        "most_tokens_per_s": _rounded(found.most),
        "prefill": _prefill(found),
        "ladder": [_rung(rung) for rung in rungs],
        "tags": [_row(tag, row) for tag, row in rows.items()],
        "notes": list(found.notes),
        "provenance": _provenance(found, sizes),
    }


def _machine(found: Outlook) -> dict[str, int]:
    machine = found.machine
    return {
        "ram_bytes": machine.ram_bytes,
        "free_ram_bytes": max(0, machine.free_ram_bytes),
        "disk_bytes": machine.disk_bytes,
        "free_disk_bytes": machine.free_disk_bytes,
    }


def _tiers(found: Outlook) -> list[dict[str, Any]]:
    placement, slots = found.placement, found.manifest.slots
    gpu = placement.on_device
    tiers = [
        {"name": "ram", "bytes": placement.experts_bytes, "experts": placement.slots},
        {"name": "disk", "bytes": slots.max_bytes, "experts": slots.experts},
    ]
    if gpu is not None:
        tiers.insert(0, {"name": "device", "bytes": gpu.arena_bytes, "experts": gpu.slots})
    return tiers


def _prefill(found: Outlook) -> dict[str, Any]:
    seen = found.prefill_measured
    return {
        "prompt_tokens": found.prompt_tokens,
        "bound_s": _rounded(found.prefill_s, 7),
        "measured_tokens_per_s": _measured(seen),
        "measured_prompt_tokens": None if seen is None else seen.tokens,
    }


def _rung(rung: Outlook) -> dict[str, Any]:
    return {
        "memory_bytes": rung.placement.memory_bytes,
        "experts_in_ram": rung.placement.slots,
        "needed_ram_bytes": rung.placement.peak_bytes,
        "fits": "RAM" not in rung.problems,
        "bound_tokens_per_s": _rounded(rung.bound),
        "measured_tokens_per_s": _measured(rung.measured),
        "prefill_bound_s": _rounded(rung.prefill_s, 7),
    }


def _row(tag: str, row: Outlook) -> dict[str, Any]:
    return {
        "tag": tag,
        "disk_bytes": row.model_bytes,
        "min_memory_bytes": row.placement.min_memory_bytes,
        "memory_bytes": row.placement.memory_bytes,
        "experts_in_ram": row.placement.slots,
        "expected_tokens_per_s": _measured(row.measured),
        "bound_tokens_per_s": _rounded(row.bound),
        "fits": not row.problems,
        "problems": row.problems,
    }


def _provenance(found: Outlook, sizes: str) -> dict[str, Any]:
    speeds, seen = found.machine.speeds, found.measured
    bound = _BOUND if found.placement.on_device is None else _BELOW
    expected = _UNMEASURED
    if seen is not None:
        expected = f"measured here with {seen.slots} experts in RAM on {seen.measured_at}"
    measured = found.machine.disk_is_measured
    return {
        "sizes": sizes,
        "expected_tokens_per_s": expected,
        "bound_tokens_per_s": _UNKNOWN if found.bound is None else bound,
        "ram_bytes_per_s": round(speeds.ram_bytes_per_s),
        "ram": speeds.ram_provenance,
        "disk_bytes_per_s": round(speeds.disk_bytes_per_s) if measured else None,
        "disk": speeds.disk_provenance,
        "products_per_s": _rounded(speeds.products_per_s, 0),
        "free_bytes": max(0, found.machine.free_ram_bytes),
    }


def _measured(seen: MeasuredSpeed | None) -> float | None:
    return None if seen is None else _rounded(seen.tokens_per_s)


def _rounded(figure: float | None, digits: int = 2) -> float | None:
    return None if figure is None else round(figure, digits)


def verdict(found: Outlook) -> str:
    """Return one line: whether the model runs here, how fast, and what a pull takes."""
    name, size = str(found.manifest.model), format_bytes
    if found.problems:
        return f"{name} does not run here: {'; '.join(found.problems.values())}"
    parts = [f"{name} runs here: {_speed(found)}"]
    if found.pull is not None:
        free = size(found.machine.free_disk_bytes)
        fetched = found.pull.download_bytes
        parts.append(f"download {size(fetched)}" if fetched else "nothing to download")
        parts.append(f"disk {size(found.model_bytes)} of {free} free")
    return "; ".join(parts)


def remedy(found: Outlook, rows: Rows) -> str:
    """Return commands or options that run where this plan does not; empty if it runs."""
    if not found.problems:
        return ""
    if "GPU" in found.problems:
        return "--device cpu"
    tries = []
    if found.fit is not None and "disk" not in found.problems:
        tries.append(f"--memory {_option(found.fit)}")
    name = found.manifest.name
    tries += [f"the tag {row.manifest.tag}" for row in rows.values() if not row.problems][:1]
    if not tries:
        machine = found.machine
        room = min(max(0, machine.free_ram_bytes), machine.free_disk_bytes)
        others = (e for e in fitting(room) if e.disk_bytes <= room and e.name != name)
        tries += [f"`moeinf plan {entry.name}`" for entry in others]
    lacking = " and ".join(found.problems)
    return " or ".join([*tries, f"the same command after you free some {lacking}"])


def device_document(gpu: DevicePlacement, miss: Miss, bus: Bus | None) -> dict[str, Any]:
    """Return the planned use of device memory in bytes, with the provenance of each figure."""
    return {
        "gpu": gpu.gpu,
        "miss": miss,
        "budget_bytes": gpu.budget_bytes,
        "peak_bytes": gpu.peak_bytes,
        "arena_bytes": gpu.arena_bytes,
        "dense_bytes": gpu.dense_bytes,
        "kv_bytes": gpu.kv_bytes,
        "workspace_bytes": gpu.workspace_bytes,
        "context_bytes": gpu.context_bytes,
        "bus_bytes_per_s": None if bus is None else round(bus[0]),
        "provenance": {
            "budget_bytes": gpu.provenance,
            "workspace_bytes": "computed: what a prefill chunk computes with",
            "context_bytes": gpu.context_why,
            "bus_bytes_per_s": bus_words(bus),
        },
    }


def bus_words(bus: Bus | None) -> str:
    return "never measured: `moeinf devices` does" if bus is None else f"`moeinf devices`, {bus[1]}"


def _speed(found: Outlook) -> str:
    """Return the measured speed, or else the bounds, in words."""
    gpu = found.placement.on_device
    memory = f"with {format_bytes(found.placement.experts_bytes)} for experts"
    if found.measured is not None:
        return f"measured {found.measured.tokens_per_s:.1f} tokens/s {memory}"
    if gpu is not None:
        memory = f"with {format_bytes(gpu.peak_bytes)} of {gpu.gpu}"
    if found.bound is None or found.most is None:
        return f"its speed is unknown {memory}"
    most, random = speed_text(found.most), speed_text(found.bound)
    if most == random:
        return f"at most about {most} tokens/s (a bound, not measured) {memory}"
    bounds = f"{most} tokens/s, {random} if routing is random"
    return f"at most about {bounds} (bounds, not measured), {memory}"


def speed_text(speed: float) -> str:
    """Return tokens per second as text."""
    return f"{speed:.1f}" if speed < 1000 else f"{speed:.0f}"


def _option(count: int) -> str:
    """Return bytes as a value of --memory that is not larger."""
    return f"{count >> 20}MiB" if count >= 1 << 30 else str(count)
