"""Place a model and the one that drafts for it: the draft first, since it must not read the disk.

A draft model is worth its time only if all its experts are in memory. It gets memory for them, up
to a share of what is free. Layers for multi-token prediction get memory for all of theirs, unless
the experts of the model would have less.
"""

from __future__ import annotations

from dataclasses import replace

from moeinf.offload.store.budget import DoesNotFit
from moeinf.runtime.config import EngineConfig
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.placement.plan import BadContext, Placement, place
from moeinf.runtime.sizes import MemorySize, format_bytes

_SHARE = 1 / 4  # of the free memory, at most, for what drafts
_ITEM_BYTES = 2  # of a hidden state, in bf16


def place_both(
    manifest: Manifest,
    config: EngineConfig,
    available_bytes: int,
    cores: int,
    machine_bytes: int = 0,
    draft: Manifest | None = None,
) -> tuple[Placement, Placement | None]:
    """Return the placements of a model and of its draft model. Raises as `place`.

    Without a draft model, the second one is that of the model's own layers for multi-token
    prediction, if it has them. The first one counts the memory of both.
    """
    found = place(manifest, config, available_bytes, cores, machine_bytes)
    if draft is None:
        return _with_modules(found, manifest, config, available_bytes, cores, machine_bytes)
    if found.on_device is not None:
        words = "--draft changes nothing: with a GPU a pass decodes one token"
        return replace(found, fallbacks=(*found.fallbacks, words)), None
    own = draft_config(config, min(found.context, draft.max_context), found.threads)
    least = replace(own, memory=MemorySize(bytes=draft.slots.min_bytes))
    fixed = place(draft, least, available_bytes, cores).peak_bytes - draft.slots.min_bytes
    room = int(available_bytes * _SHARE) - fixed
    asked = min(max(room, draft.slots.min_bytes), draft.slots.max_bytes)
    own = replace(own, memory=MemorySize(bytes=asked))
    second = place(draft, own, available_bytes, cores)
    found = place(manifest, config, available_bytes - second.peak_bytes, cores, machine_bytes)
    share = "all" if second.slots == draft.slots.experts else f"{second.slots}"
    note = f"draft {draft.model}: {format_bytes(second.peak_bytes)} with {share} of its experts"
    return (
        replace(found, draft_bytes=second.peak_bytes, notes=(*found.notes, note)),
        second,
    )


def _with_modules(
    found: Placement,
    manifest: Manifest,
    config: EngineConfig,
    available_bytes: int,
    cores: int,
    machine_bytes: int,
) -> tuple[Placement, Placement | None]:
    """Return a placement with that of the layers for multi-token prediction beside it, or alone."""
    modules = manifest.modules
    wanted = config.mtp and may_draft(manifest, config) and found.on_device is None
    if modules is None or not wanted:
        return found, None
    own = draft_config(config, found.context, found.threads)
    own = replace(own, memory=MemorySize(bytes=modules.slots.max_bytes))
    second = place(modules, own, available_bytes, cores)
    more = second.peak_bytes + found.context * manifest.hidden_width * _ITEM_BYTES
    named = f"layers for multi-token prediction: {format_bytes(more)}"
    less = f"{named}, unused: they would take memory from the experts"
    alone = replace(found, notes=(*found.notes, less))
    if more > available_bytes * _SHARE:
        return alone, None
    try:
        beside = place(manifest, config, available_bytes - more, cores, machine_bytes)
    except (DoesNotFit, BadContext):
        return alone, None
    same = (beside.slots, beside.context) == (found.slots, found.context)
    if not same or beside.peak_bytes + more > available_bytes:
        return alone, None
    notes = (*beside.notes, f"{named}; they draft tokens")
    return replace(beside, draft_bytes=more, notes=notes), second


def may_draft(manifest: Manifest, config: EngineConfig) -> bool:
    """Return True if a row of several of one request equals the row computed alone, on a CPU.

    Not with torch's float32 products, or if residency chooses the result.
    """
    drafts = config.speculation and not config.lossy
    return drafts and manifest.dtype != "F32" and not manifest.encoder_layers


def draft_config(config: EngineConfig, context: int, threads: int) -> EngineConfig:
    """Return the options of a draft model beside an engine with `config`."""
    return EngineConfig(
        context=context,
        policy=config.policy,
        readers=config.readers,
        direct_io=config.direct_io,
        threads=threads,
        trace=False,
        device="cpu",
        kv=config.kv,
        speculation=False,
    )
