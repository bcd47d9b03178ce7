"""Answer whether a model runs on this machine, and how fast: measured speeds, and bounds.

This module loads nothing and fetches nothing.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from moeinf.offload.format.drives import check_homes
from moeinf.offload.gpu_tier.miss_split import Miss
from moeinf.offload.store.budget import DoesNotFit
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.library.processes import Registry
from moeinf.runtime.machine.device_choice import why_unusable
from moeinf.runtime.machine.measurements import remembered_bus
from moeinf.runtime.machine.memory import available_bytes, core_count
from moeinf.runtime.placement.bandwidth import Speeds, measure, with_products
from moeinf.runtime.placement.bounds import prefill_seconds, seconds_per_token, without_misses
from moeinf.runtime.placement.decode_speed import (
    MeasuredSpeed,
    remembered_prefill,
    remembered_speed,
)
from moeinf.runtime.placement.draft_plan import place_both
from moeinf.runtime.placement.plan import Placement
from moeinf.runtime.sizes import MemorySize, format_bytes
from moeinf.runtime.system import physical_bytes

PROMPT_TOKENS = 1000  # the prompt whose prefill a plan shows
_SHARES = (0.25, 0.5, 0.75, 1.0)  # of the experts, in a ladder


@dataclass(frozen=True)
class Machine:
    """The machine that a plan is made for. free_ram_bytes leaves out other engines' claims."""

    ram_bytes: int
    free_ram_bytes: int
    disk_bytes: int
    free_disk_bytes: int
    cores: int
    speeds: Speeds
    more_disks: tuple[tuple[Path, int], ...] = ()  # further homes on other drives: bytes free

    @property
    def disk_is_measured(self) -> bool:
        return math.isfinite(self.speeds.disk_bytes_per_s)


@dataclass(frozen=True)
class PullSize:
    """The bytes of a pull: to fetch, the model on disk, and further disk space while it runs.

    written_bytes: written by an earlier, unfinished pull.
    """

    download_bytes: int
    disk_bytes: int
    extra_bytes: int = 0
    written_bytes: int = 0


@dataclass(frozen=True)
class Outlook:
    """The plan for one model on this machine, and its speed.

    bound         tokens per second that memory traffic allows with uniformly random routing; None
                  when nearly all experts are on a GPU, whose own time is not measured
    most          the same without any cache miss
    measured      decoding, as a run on this machine measured it with about as many slots
    prompt_tokens the prompt of both prefill figures; prefill_s is the bound; None with a GPU
    problems      reasons why it does not run here, by what is lacking: RAM, disk, GPU
    fit           --memory that runs where this plan does not; None: no such size exists
    """

    manifest: Manifest
    placement: Placement
    machine: Machine
    pull: PullSize | None
    miss: Miss
    bus: tuple[float, str] | None
    bound: float | None
    most: float | None
    measured: MeasuredSpeed | None
    prompt_tokens: int
    prefill_s: float | None
    prefill_measured: MeasuredSpeed | None
    problems: dict[str, str]
    fit: int | None = None

    @property
    def model_bytes(self) -> int:
        """The bytes of the model on disk."""
        return self.manifest.size_bytes if self.pull is None else self.pull.disk_bytes

    @property
    def notes(self) -> tuple[str, ...]:
        """The choices with their reasons."""
        return (*self.placement.notes, *self.placement.fallbacks)


def look(settings: Settings, folder: Path, manifest: Manifest) -> Machine:
    """Measure this machine for a plan, with the drive of `folder`; use remembered speeds."""
    claimed = sum(engine.unfilled_bytes() for engine in Registry(settings.run).engines())
    speeds = with_products(measure(settings, folder, manifest))
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    disk, device = shutil.disk_usage(folder), folder.stat().st_dev
    check_homes(settings.more_homes)
    others = [home for home in settings.more_homes if home.stat().st_dev != device]
    more = tuple((home, shutil.disk_usage(home).free) for home in others)
    free = available_bytes() - claimed
    return Machine(physical_bytes(), free, disk.total, disk.free, core_count(), speeds, more)


def outlook(
    manifest: Manifest,
    config: EngineConfig,
    settings: Settings,
    machine: Machine,
    pull: PullSize | None = None,
) -> Outlook:
    """Return the outlook of a model, also if it does not run here. pull: None if it is installed.

    Raises DoesNotFit for a --memory below the model's least, BadContext, DeviceUnavailable,
    DeviceDoesNotFit.
    """
    least, short = manifest.slots.min_bytes, False
    try:
        placement = _placed(manifest, config, settings, machine)
    except DoesNotFit:
        if config.memory is not None:
            raise
        config, short = replace(config, memory=MemorySize(bytes=least)), True
        placement = _placed(manifest, config, settings, machine)
    fit = None
    over = placement.peak_bytes > machine.free_ram_bytes
    if short and not over:
        fit = least
    elif over and not short:
        fit = _fitting(manifest, config, settings, machine)
    found = _speeds(manifest, placement, config, settings, machine, pull)
    problems = {**_lack_of_ram(placement, machine, short), **_lack_of_disk(found)}
    gpu = placement.on_device
    if gpu is not None and (why := why_unusable(gpu.gpu)) is not None:
        problems["GPU"] = why
    return replace(found, problems=problems, fit=fit)


def ladder(found: Outlook, config: EngineConfig, settings: Settings) -> Iterator[Outlook]:
    """Yield the outlook with memory for 25, 50, 75 and 100 % of the experts, or with the least."""
    slots = found.manifest.slots
    budgets = {max(slots.min_bytes, round(share * slots.max_bytes)) for share in _SHARES}
    for budget in sorted(budgets):
        rung = replace(config, memory=MemorySize(bytes=budget))
        yield outlook(found.manifest, rung, settings, found.machine, found.pull)


def _placed(
    manifest: Manifest, config: EngineConfig, settings: Settings, machine: Machine
) -> Placement:
    draft = None if config.draft is None else Library(settings).read(config.draft)[0]
    memory = machine.free_ram_bytes, machine.cores, machine.ram_bytes
    return place_both(manifest, config, *memory, draft)[0]


def _fitting(
    manifest: Manifest, config: EngineConfig, settings: Settings, machine: Machine
) -> int | None:
    """Return the --memory that a plan takes by default; None if the default does not fit either."""
    try:
        chosen = replace(config, memory=None)
        return _placed(manifest, chosen, settings, machine).experts_bytes
    except DoesNotFit:
        return None


def _lack_of_ram(placement: Placement, machine: Machine, short: bool) -> dict[str, str]:
    free = format_bytes(max(0, machine.free_ram_bytes))
    if placement.peak_bytes > machine.free_ram_bytes:
        return {"RAM": f"{format_bytes(placement.peak_bytes)} of RAM are needed, {free} are free"}
    if short:
        return {"RAM": f"{free} of free RAM leave too little for other programs"}
    return {}


def _lack_of_disk(found: Outlook) -> dict[str, str]:
    pull = found.pull
    if pull is None:
        return {}
    manifest, more = found.manifest, found.machine.more_disks
    needed = pull.disk_bytes + pull.extra_bytes - pull.written_bytes
    share = manifest.layers * manifest.experts * manifest.read_bytes // (1 + len(more))
    lacks = [(needed - len(more) * share, found.machine.free_disk_bytes, "")]
    lacks += [(share, free, f" in {home}") for home, free in more]
    for wanted, free, where in lacks:
        if wanted > free:
            words = f"{format_bytes(wanted)} of disk are needed, {format_bytes(free)} are free"
            return {"disk": f"{words}{where}"}
    return {}


def _speeds(
    manifest: Manifest,
    placement: Placement,
    config: EngineConfig,
    settings: Settings,
    machine: Machine,
    pull: PullSize | None,
) -> Outlook:
    gpu, model, slots = placement.on_device, manifest.model, placement.slots
    bus = None if gpu is None else remembered_bus(settings, gpu.gpu)
    rest = (machine.speeds, config.miss, None if bus is None else bus[0])
    seconds = seconds_per_token(placement, manifest, *rest)
    least = seconds_per_token(without_misses(placement, manifest), manifest, *rest)
    prompt = min(PROMPT_TOKENS, config.context or manifest.max_context)
    known = gpu is None and pull is None  # speeds are those of an installed model on the CPU
    return Outlook(
        manifest,
        placement,
        machine,
        pull,
        config.miss,
        bus,
        bound=1 / seconds if seconds else None,
        most=1 / least if least else None,
        measured=remembered_speed(settings, model, slots) if known else None,
        prompt_tokens=prompt,
        prefill_s=prefill_seconds(placement, manifest, machine.speeds, prompt),
        prefill_measured=remembered_prefill(settings, model, slots) if known else None,
        problems={},
    )
