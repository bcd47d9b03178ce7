"""Define `moeinf plan`: show whether a model runs here, how fast, and what it needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from moeinf.cli.options import (
    Context,
    Device,
    DeviceMemory,
    DraftModel,
    Json,
    KvForm,
    Memory,
    NoMtp,
    NoPrefixCache,
    OnMiss,
    PlannedModel,
    PolicyName,
    Quiet,
    Threads,
    engine_config,
)
from moeinf.cli.output import Output
from moeinf.cli.views.plan_document import plan_document
from moeinf.cli.views.plan_text import print_outlook
from moeinf.offload.policy.names import DEFAULT_POLICY
from moeinf.offload.store.budget import DoesNotFit
from moeinf.runtime.config import EngineConfig, Settings, read_environment
from moeinf.runtime.hub.resolve import can_be_had, find_source
from moeinf.runtime.library.library import Library, NoSuchModel
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.names import BadName, ModelName, expand, is_path, parse_name
from moeinf.runtime.placement.gpu_plan import DeviceDoesNotFit
from moeinf.runtime.placement.outlook import Machine, Outlook, PullSize, ladder, look, outlook
from moeinf.runtime.sizes import MemorySize

_UNNAMED = "checkpoint"  # the name of a folder whose own name is not a model name
Tags = dict[str, tuple[Manifest, PullSize]]


def plan(
    model: PlannedModel,
    memory: Memory = None,
    device: Device = "auto",
    device_memory: DeviceMemory = None,
    miss: OnMiss = "auto",
    ctx: Context = None,
    policy: PolicyName = DEFAULT_POLICY,
    kv: KvForm = None,
    threads: Threads = None,
    no_prefix_cache: NoPrefixCache = False,
    draft: DraftModel = None,
    no_mtp: NoMtp = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show whether a model runs here, how fast, and what it needs; load and pull nothing.

    MODEL may also be a folder with a checkpoint. For a model that is not pulled yet, its headers
    are read and every tag is shown. A bound is the most that the memory of this machine allows. A
    measured speed is that of the last `moeinf run` with about this memory.

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
        prefix_cache=not no_prefix_cache,
        kv=kv,
        draft=draft,
        mtp=not no_mtp,
    )
    print_plan(model, config, settings, out)


def print_plan(model: str, config: EngineConfig, settings: Settings, out: Output) -> None:
    """Print the plan of `plan` and `run --dry-run`.

    Raises NoSuchModel, DoesNotFit for a --memory below the least, BadContext, DeviceDoesNotFit.
    """
    tags: Tags = {}
    folder, pull = settings.models, None
    installed = None if is_path(model) else _installed(model, settings)
    if installed is not None:
        manifest, folder = installed
        sizes = "the manifest of the pulled model"
    else:
        name, tags = _prospects(model, settings, out)
        manifest, pull = tags[name.tag]
        sizes = "the headers of the source; nothing was pulled"
    if config.draft is not None:
        from moeinf.runtime.library.draft_model import find_draft  # imports tokenizers

        source = None if installed is None else folder
        find_draft(config.draft, manifest, source, Library(settings))
    machine = look(settings, folder, manifest)
    found = outlook(manifest, config, settings, machine, pull)
    rungs = list(ladder(found, config, settings))
    rows = {tag: _row(*about, config, settings, machine) for tag, about in tags.items()}
    if out.json:
        out.document(plan_document(found, rungs, rows, sizes))
    else:
        print_outlook(found, rungs, rows, sizes, out)


def _installed(model: str, settings: Settings) -> tuple[Manifest, Path] | None:
    """Return an installed model, or None if it can be pulled. Raises NoSuchModel."""
    try:
        return Library(settings).read(model)
    except NoSuchModel:
        if can_be_had(model):
            return None
        raise


def _prospects(model: str, settings: Settings, out: Output) -> tuple[ModelName, Tags]:
    """Return the name that a pull would give, and by tag its manifest and its sizes."""
    from moeinf.runtime.library.repack import measure_source, prospects  # imports torch

    wanted, source = find_source(model, _name_of(model), settings, out.note)
    sizes = measure_source(source)
    written = {partial.name: partial.size_bytes for partial in Library(settings).partials()}
    return wanted, {
        tag: (
            manifest,
            PullSize(
                sizes.download_bytes,
                sizes.disk_bytes[tag],
                sizes.extra_bytes,
                written.get(manifest.model, 0),
            ),
        )
        for tag, manifest in prospects(source, wanted).items()
    }


def _name_of(model: str) -> str | None:
    """Return a name for a folder whose own name is not a model name; else None."""
    if not is_path(model):
        return None
    try:
        parse_name(expand(model).name)
    except BadName:
        return _UNNAMED
    return None


def _row(
    manifest: Manifest,
    pull: PullSize,
    config: EngineConfig,
    settings: Settings,
    machine: Machine,
) -> Outlook:
    """Return the outlook of a tag; one that the given memory is too small for keeps its sizes."""
    try:
        return outlook(manifest, config, settings, machine, pull)
    except DoesNotFit as error:
        config = replace(config, memory=MemorySize(bytes=manifest.slots.min_bytes))
        lack = {"RAM": str(error)}
    except DeviceDoesNotFit as error:
        config = replace(config, device="cpu", device_memory=None)
        lack = {"GPU": str(error)}
    row = outlook(manifest, config, settings, machine, pull)
    return replace(row, problems={**row.problems, **lack}, bound=None, most=None, measured=None)
