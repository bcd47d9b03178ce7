"""Define `moeinf devices`: measure this machine's memory, drive and bus, and store the speeds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from moeinf.cli.errors import Usage
from moeinf.cli.options import Json, Quiet
from moeinf.cli.output import Output
from moeinf.native import DeviceError
from moeinf.offload.format.drives import check_homes
from moeinf.runtime.config import Settings, read_environment
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.machine.disk_bench import IN_FLIGHT, WHOLE_BLOCKS, Sweep, sweep, written_files
from moeinf.runtime.machine.gpu import NoGpu, all_gpus, find_gpu, open_context
from moeinf.runtime.machine.measurements import Drive, Ram, drive_key, remember, remember_gpu
from moeinf.runtime.machine.memory import available_bytes, core_count
from moeinf.runtime.placement.bandwidth import measure_ram, thorough_drive
from moeinf.runtime.sizes import format_bytes, parse_memory

_EXPERT = "4MiB"
_FILES_BYTES = 512 << 20
_WAYS = {"direct": "past the page cache (O_DIRECT)", "buffered": "through the page cache"}


def _expert_bytes(text: str) -> int:
    try:
        size = parse_memory(text).of(0)
    except InvalidValue as error:
        raise typer.BadParameter(str(error)) from error
    if not 4096 <= size <= _FILES_BYTES // max(IN_FLIGHT):
        raise typer.BadParameter(f"expected 4KiB to {format_bytes(_FILES_BYTES // max(IN_FLIGHT))}")
    return size


def devices(
    folder: Annotated[
        Path | None,
        typer.Option(help="A folder of the drive. Default: where models are.", show_default=False),
    ] = None,
    expert_size: Annotated[
        int, typer.Option(parser=_expert_bytes, metavar="SIZE", help="Bytes of one read.")
    ] = _EXPERT,  # type: ignore[assignment]
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure memory and the models' drive in about 20 seconds; `plan` and `run` use the result.

    If MOEINF_HOME has several folders, they are read at the same time.

    Example: moeinf devices
    """
    out, settings = Output(json=json, quiet=quiet), read_environment()
    if folder is not None and not folder.is_dir():
        raise Usage(f"--folder: {folder} is not a folder")
    place = (folder or settings.models).absolute()
    more = () if folder is not None else settings.more_homes
    check_homes(more)
    where = os.pathsep.join(map(str, (place, *more)))
    with out.progress("") as update:
        ram = measure_ram(lambda done, total: update("memory", done, total))
        count = _FILES_BYTES // expert_size
        with written_files(
            (place, *more), expert_size, count, lambda done, total: update("writing", done, total)
        ) as pieces:
            swept = sweep(pieces, lambda done, total: update("drive", done, total))
            drive = thorough_drive(swept, expert_size)
            key = drive_key(place, *more)
    remember(settings, ram=ram, drive=(place, drive), more=more)
    gpus, bus = all_gpus(settings.libcuda), _Bus()
    if not isinstance(gpus, NoGpu):
        bus = _bus(settings)
    if json:
        document = _document(where, key, ram, drive, swept)
        out.document(document | {"gpus": _gpus(gpus, bus)})
    else:
        _print(out, where, ram, drive, swept)
        _print_gpus(out, gpus, bus)


@dataclass(frozen=True)
class _Bus:
    """The bus to the first GPU.

    bytes_per_s   None where it cannot be measured
    locked        True if the host's memory was page-locked
    why           the reason if it was not, or if nothing could be measured
    """

    bytes_per_s: float | None = None
    locked: bool | None = None
    why: str | None = None

    def __str__(self) -> str:
        if self.bytes_per_s is None:
            return f"bus not measured: {self.why}"
        how = "page-locked memory" if self.locked else f"pageable memory, as {self.why}"
        return f"bus {self.bytes_per_s / 1e9:.1f} GB/s from {how}"


def _bus(settings: Settings) -> _Bus:
    """Measure the bus to the first GPU and store its speed."""
    from moeinf.runtime.machine.bus_bench import measure_bus  # imports torch

    gpu = find_gpu(settings.libcuda)
    if isinstance(gpu, NoGpu):
        return _Bus(why=gpu.why)
    try:
        speed, refusal = measure_bus(open_context(gpu))
    except DeviceError as error:
        return _Bus(why=str(error))
    remember_gpu(settings, gpu.name, bus_bytes_per_s=speed)
    return _Bus(speed, refusal is None, refusal)


def _gpus(gpus: list[tuple[str, int]] | NoGpu, bus: _Bus) -> list[dict[str, Any]]:
    found = [] if isinstance(gpus, NoGpu) else gpus
    buses = [bus, *[_Bus()] * len(found)]
    return [
        {
            "name": name,
            "total_bytes": total,
            "bus_bytes_per_s": None if one.bytes_per_s is None else round(one.bytes_per_s),
            "bus_page_locked": one.locked,
            "bus_note": one.why,
        }
        for (name, total), one in zip(found, buses, strict=False)
    ]


def _print_gpus(out: Output, gpus: list[tuple[str, int]] | NoGpu, bus: _Bus) -> None:
    if isinstance(gpus, NoGpu):
        out.prose(f"GPU: none ({gpus.why}).")
        return
    for number, (name, total) in enumerate(gpus):
        speed = "" if number else f", {bus}"
        out.prose(f"GPU {number}: {name}, {format_bytes(total)}{speed}.")


def _document(where: str, key: str, ram: Ram, drive: Drive, swept: Sweep) -> dict[str, Any]:
    name, best = ram.best
    chosen = drive.reading
    return {
        "memory": {
            "cores": core_count(),
            "available_bytes": available_bytes(),
            "loops_bytes_per_s": {loop: round(speed) for loop, speed in ram.loops.items()},
            "best_loop": name,
            "best_bytes_per_s": round(best),
        },
        "disk": {
            "folder": where,
            "drive": key,
            "read_bytes": drive.piece_bytes,
            "direct_bytes_per_s": {str(n): round(speed) for n, speed in swept.direct.items()},
            "buffered_bytes_per_s": {str(n): round(speed) for n, speed in swept.buffered.items()},
            "block_bytes_per_s": {str(n): round(speed) for n, speed in swept.blocks.items()},
            "chosen": {
                "readers": chosen.readers,
                "direct": chosen.direct,
                "block_bytes": chosen.block_bytes,
                "bytes_per_s": round(chosen.bytes_per_s),
            },
            "notes": list(drive.notes),
        },
        "measured_at": drive.measured_at,
    }


def _print(out: Output, where: str, ram: Ram, drive: Drive, swept: Sweep) -> None:
    best = ram.best[0]
    rows = [
        [name, f"{speed / 1e9:.1f} GB/s", "best" if name == best else ""]
        for name, speed in ram.loops.items()
    ]
    out.table(["MEMORY READ", "", ""], rows)
    out.line()
    chosen = drive.reading
    ways = {"direct": swept.direct, "buffered": swept.buffered}
    table = []
    for name, speeds in ways.items():
        cells = [f"{speeds[n] / 1e9:.2f}" if n in speeds else "refused" for n in IN_FLIGHT]
        table.append([_WAYS[name], *cells])
    size = format_bytes(drive.piece_bytes)
    out.prose(f"Random reads of {size} in {where}, GB/s by reads in flight:")
    out.table(["DISK READ", *(str(n) for n in IN_FLIGHT)], table)
    out.line()
    if chosen.block_bytes == WHOLE_BLOCKS:
        block = "an expert per system call"
    else:
        block = f"{format_bytes(chosen.block_bytes)} per system call"
    way = _WAYS["direct" if chosen.direct else "buffered"]
    out.prose(
        f"Chosen: {chosen.readers} readers, {way}, {block} ({chosen.bytes_per_s / 1e9:.2f} GB/s)."
    )
    if chosen.direct and max(swept.buffered.values()) > chosen.bytes_per_s:
        out.prose("The page cache is not twice as fast, and a memory limit counts its pages.")
    for note in drive.notes:
        out.prose(f"Note: {note}.")
    out.note("What a drive or a hypervisor caches below the page cache cannot be seen from here.")
