"""Describe the experts of a loaded model at one moment: where they are, and their use.

It reads counters and copies the slot tables. The engine's thread never waits for it.
"""

from __future__ import annotations

import base64
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.routing.recent_use import heat_of
from moeinf.server.engines.layer_numbers import layer_numbers

if TYPE_CHECKING:
    from moeinf.offload.store.expert_store import ExpertStore
    from moeinf.runtime.engine.engine import Engine
    from moeinf.server.engines.worker import Worker

RAM, GPU, READING, USED = 1, 2, 4, 8  # bits 0 and 1 are the tier, 0: on disk only
HEAT_SHIFT = 4


@dataclass(frozen=True)
class Moment:
    """Counters at one time; a frame describes the time between two. at: time.monotonic()."""

    at: float
    passes: int
    tokens: int
    bytes_read: int
    bus_bytes: int


class ExpertMap:
    """The frames of one loaded model, for one watcher."""

    def __init__(self, worker: Worker, engine: Engine) -> None:
        """Start at this moment. `engine` is the worker's."""
        self._worker, self._engine = worker, engine
        self._layers = layer_numbers(engine)
        self._before = self._now()
        engine.store.recent.passes()  # from now on what is on a device is noted, too

    @property
    def gone(self) -> bool:
        """True once the model is unloaded."""
        return self._worker.engine is not self._engine

    def frame(self) -> dict[str, Any]:
        """Return what is true now, and the use and the speeds since the frame before."""
        before, now = self._before, self._now()
        self._before = now
        seconds = max(now.at - before.at, 1e-6)
        engine, worker = self._engine, self._worker
        store, info = engine.store, engine.info
        stats, shape = store.stats, info.manifest
        cells = map_of(store, before.passes)
        tiers = np.bincount(cells & 3, minlength=3).tolist()
        hits = stats.decode_hits + stats.prefill_hits
        uses = max(hits, stats.decode_events + stats.prefill_events)
        upper = store.device
        return {
            "model": str(info.name),
            "layers": shape.layers,
            "experts": shape.experts,
            "layer_numbers": self._layers,
            "map": base64.b64encode(cells.tobytes()).decode(),
            "hits": hits,
            "misses": uses - hits,
            "hit_rate": hits / uses if uses else None,
            "read_bytes_per_s": (now.bytes_read - before.bytes_read) / seconds,
            "bus_bytes_per_s": (now.bus_bytes - before.bus_bytes) / seconds,
            "tiers": {
                "disk": {"experts": tiers[0]},
                "ram": _tier(tiers[RAM], store.host.slots, info.slot_bytes),
                "gpu": None if upper is None else _tier(tiers[GPU], upper.slots, info.slot_bytes),
            },
            "budget_bytes": info.placement.memory_bytes,
            "in_flight": int(np.count_nonzero(cells & READING)),
            "tokens_per_s": (now.tokens - before.tokens) / seconds,
            "queue": {"running": worker.running, "waiting": worker.waiting},
            "prediction": {
                "read_bytes": stats.ahead_bytes_read,
                "used_bytes": stats.ahead_bytes_used,
                "wasted_bytes": max(0, stats.ahead_bytes_wasted),
                "hits_hinted": stats.decode_hits_hinted,
                "hits_predicted": stats.decode_hits_predicted,
            },
            "time": time.time(),
        }

    def _now(self) -> Moment:
        store = self._engine.store
        stats, passes = store.stats, store.recent.number
        at = time.monotonic()
        return Moment(at, passes, self._worker.tokens, stats.bytes_read, stats.bus_bytes)


def map_of(store: ExpertStore, since: int) -> NDArray[np.uint8]:
    """Return a byte per cell. since: the number of a pass; USED marks what later ones used.

    An expert in RAM and on the GPU counts as on the GPU.
    """
    places = store.host.table.places()
    found = (places >= 0).astype(np.uint8) * RAM
    found[places < -1] |= READING
    for tier in store.above:
        there = tier.table.places() >= 0
        found[: len(there)][there] = found[: len(there)][there] & READING | GPU
    passes = store.recent.passes()
    for one in passes:
        if one.number > since:
            found[one.cells()] |= USED
    found |= np.left_shift(heat_of(passes, len(found)), HEAT_SHIFT, dtype=np.uint8)
    return found


def _tier(experts: int, slots: int, slot_bytes: int) -> dict[str, int]:
    return {"experts": experts, "slots": slots, "bytes": experts * slot_bytes}
