"""Print the outlook of a model: a verdict, the figures behind it, and what other memory gives.

Measured figures and bounds have columns of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from moeinf.cli.output import Output
from moeinf.cli.views.gpu_plan import device_fields
from moeinf.runtime.jobs.plan_document import Rows, remedy, speed_text, verdict
from moeinf.runtime.placement.decode_speed import MeasuredSpeed
from moeinf.runtime.placement.outlook import Outlook
from moeinf.runtime.placement.plan import Placement
from moeinf.runtime.sizes import format_bytes, format_bytes_up


def print_outlook(
    found: Outlook, rungs: Sequence[Outlook], rows: Rows, sizes: str, out: Output
) -> None:
    """Print the text of `moeinf plan`. sizes: the provenance of the sizes."""
    out.line(verdict(found))
    if hint := remedy(found, rows):
        out.line(f"Try: {hint}")
    out.line()
    out.fields([*_memory(found, sizes), *_speeds(found)])
    out.line()
    prompt = f"prefill: {found.prompt_tokens:,} tokens"
    out.line(f"With other memory for experts (bounds: random routing; {prompt}):")
    columns = ["EXPERTS", "MEMORY", "FITS", "DECODE AT MOST", "MEASURED", "PREFILL AT LEAST"]
    out.table(columns, [_rung(rung) for rung in rungs])
    if rows:
        out.line()
        columns = ["TAG", "ON DISK", "LEAST --memory", "EXPERTS IN RAM", "AT MOST", "FITS"]
        out.table(columns, [_row(tag, row) for tag, row in rows.items()])
    for note in found.notes:
        out.note(note)


def _memory(found: Outlook, sizes: str) -> list[tuple[str, str]]:
    size, placement, slots = format_bytes, found.placement, found.manifest.slots
    machine, gpu = found.machine, found.placement.on_device
    free = size(max(0, machine.free_ram_bytes))
    needed = size(placement.peak_bytes - placement.prefix_bytes)
    ram = f"{needed} needed, {free} free of {size(machine.ram_bytes)}"
    disk = f"{size(machine.free_disk_bytes)} free of {size(machine.disk_bytes)}"
    form = "" if placement.kv == "full" else f" in {placement.kv}"
    return [
        ("sizes", sizes),
        ("RAM", ram),
        ("disk", f"{size(found.model_bytes)}{_pulled(found)}, {disk}"),
        (
            "experts in RAM",
            f"{placement.slots} of {slots.experts}, {size(placement.experts_bytes)}",
        ),
        ("experts on disk", f"{slots.experts}, {size(slots.max_bytes)}"),
        ("least --memory", format_bytes_up(placement.min_memory_bytes)),
        *([] if gpu is None else device_fields(gpu, found.miss, found.bus)),
        ("dense weights", size(placement.dense_bytes)),
        ("KV cache", f"{size(placement.kv_bytes)} for {placement.context} tokens{form}"),
        ("prefix cache", f"at most {size(placement.prefix_bytes)} more"),
        *_tables(found),
        *_draft(placement),
        ("scratch", f"at most {size(placement.scratch_bytes)}"),
        ("threads", str(placement.threads)),
    ]


def _tables(found: Outlook) -> list[tuple[str, str]]:
    size = sum(table.disk_bytes for table in found.manifest.tables)
    if not size:
        return []
    cached = format_bytes(found.placement.table_bytes)
    return [("tables on disk", f"{format_bytes(size)}, with {cached} of RAM for their rows")]


def _draft(placement: Placement) -> list[tuple[str, str]]:
    size = placement.draft_bytes
    return [("drafts", format_bytes(size))] if size else []


def _pulled(found: Outlook) -> str:
    if found.pull is None:
        return " taken"
    extra = found.pull.extra_bytes
    return f" and {format_bytes(extra)} during the pull" if extra else " needed"


def _speeds(found: Outlook) -> list[tuple[str, str]]:
    speeds, gpu = found.machine.speeds, found.placement.on_device
    disk = speeds.disk_provenance
    if found.machine.disk_is_measured:
        disk = f"{format_bytes(speeds.disk_bytes_per_s)}/s ({disk})"
    decode = "unknown: nearly everything is on the GPU, whose own time was not measured"
    if found.bound is not None and found.most is not None:
        what = (
            "memory traffic alone" if gpu is None else "RAM, bus and disk; not the GPU's own time"
        )
        most, random = speed_text(found.most), speed_text(found.bound)
        both = f" without a cache miss, {random} with random routing" if most != random else ""
        decode = f"at most {most} tokens/s{both} ({what})"
    fields = [
        ("RAM reads", f"{format_bytes(speeds.ram_bytes_per_s)}/s ({speeds.ram_provenance})"),
        ("disk reads", disk),
        ("decode, bound", decode),
        ("decode, measured", _seen(found.measured)),
    ]
    if found.prefill_s is None:
        return fields
    bound = f"at least {_seconds(found.prefill_s)} for {found.prompt_tokens:,} tokens"
    seen = _seen(found.prefill_measured)
    if found.prefill_measured is not None:
        seconds = found.prompt_tokens / found.prefill_measured.tokens_per_s
        seen = f"{_seconds(seconds)} for {found.prompt_tokens:,} tokens at {seen}"
    return [*fields, ("prefill, bound", bound), ("prefill, measured", seen)]


def _seen(seen: MeasuredSpeed | None) -> str:
    if seen is None:
        return "no; `moeinf run` remembers the speed of an answer"
    prompt = f"a prompt of {seen.tokens} tokens and " if seen.tokens else ""
    how = f"with {prompt}{seen.slots} experts in RAM, {seen.measured_at}"
    return f"{seen.tokens_per_s:.1f} tokens/s {how}"


def _rung(rung: Outlook) -> list[str]:
    share = rung.placement.slots / rung.manifest.slots.experts
    return [
        f"{share:.0%}",
        format_bytes(rung.placement.experts_bytes),
        "no" if "RAM" in rung.problems else "yes",
        "-" if rung.bound is None else f"{speed_text(rung.bound)} tokens/s",
        "-" if rung.measured is None else f"{rung.measured.tokens_per_s:.1f}",
        "-" if rung.prefill_s is None else _seconds(rung.prefill_s),
    ]


def _row(tag: str, row: Outlook) -> list[str]:
    placement = row.placement
    return [
        tag,
        format_bytes(row.model_bytes),
        format_bytes_up(placement.min_memory_bytes),
        f"{placement.slots} of {row.manifest.slots.experts}",
        "-" if row.bound is None else f"{speed_text(row.bound)}/s",
        "yes" if not row.problems else f"no: {'/'.join(row.problems)}",
    ]


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
