"""Place a model and the one that drafts for it: the draft first, since it must not read the disk.

A draft model is worth its time only if all its experts are in memory. It gets memory for them, up
to a share of what is free.
"""

from __future__ import annotations

from dataclasses import replace

from moeinf.runtime.config import EngineConfig
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.placement.plan import Placement, place
from moeinf.runtime.sizes import MemorySize, format_bytes

_SHARE = 1 / 4  # of the free memory, at most, for a draft model in all


def place_both(
    manifest: Manifest,
    config: EngineConfig,
    available_bytes: int,
    cores: int,
    machine_bytes: int = 0,
    draft: Manifest | None = None,
) -> tuple[Placement, Placement | None]:
    """Return the placements of a model and of its draft model. Raises as `place`.

    The first one counts the memory of both.
    """
    found = place(manifest, config, available_bytes, cores, machine_bytes)
    if draft is None:
        return found, None
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
