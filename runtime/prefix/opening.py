"""Open the prefix cache of an engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from hashlib import blake2b

import msgspec
import torch

from moeinf.models.base import Model
from moeinf.models.layers.kv_cache import CacheLayout, KvCache
from moeinf.native import kernel_path
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.placement.plan import Placement
from moeinf.runtime.prefix.cache import PrefixCache
from moeinf.runtime.prefix.folder import PrefixFolder
from moeinf.runtime.prefix.tree import KEY_BYTES
from moeinf.runtime.version import version

_FOLDER = "prefix"


def open_prefix_cache(
    model: Model,
    manifest: Manifest,
    placement: Placement,
    config: EngineConfig,
    settings: Settings,
    writable: bool,
    note: Callable[[str], None],
    opened: ExitStack,
) -> PrefixCache | None:
    """Return the cache that the placement has memory for; None without. opened: closes it.

    writable: whether files may be kept.
    """
    state = model.new_state(1)
    if not placement.prefix_bytes or config.prefix is None or not isinstance(state, KvCache):
        return None
    layout = state.layout
    if config.reproducible and layout.recurrent is not None:
        return None  # no whole chunk of it can be reused
    root = _identity(layout, manifest, placement, config)
    folder = None
    if writable and config.prefix.disk_bytes:
        path = settings.state_of(manifest.model) / _FOLDER
        folder = PrefixFolder(path, root, config.prefix.disk_bytes, note)
    cache = PrefixCache(layout, root, placement.prefix_bytes, config.reproducible, folder, note)
    opened.callback(cache.close)
    return cache


def _identity(
    layout: CacheLayout, manifest: Manifest, placement: Placement, config: EngineConfig
) -> bytes:
    """Return a digest of everything that the bytes of a token depend on, except the text."""
    about = {
        "version": (version(), str(torch.__version__), kernel_path()),
        "model": (manifest.digest, manifest.dtype),
        "cache": (
            layout.layers,
            layout.planes,
            layout.each,
            layout.indexers,
            layout.coarse,
            str(layout.dtype),
            layout.form,
        ),
        "recurrent": layout.recurrent and layout.recurrent.stored,
        # longrope rotates a text by other factors where there is room for more.
        "context": None if manifest.usual_context is None else placement.context,
        "threads": placement.threads if config.reproducible else None,
        "reproducible": config.reproducible,
        "lossy": dict(config.lossy),
    }
    return blake2b(msgspec.json.encode(about), digest_size=KEY_BYTES).digest()
