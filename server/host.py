"""Which engines live: loaded when a request names them, unloaded when nobody has for a while.

Does not know HTTP. Used from the event loop; engines have threads of their own. torch comes in with
the first of them, so that a server starts at once and is small while nobody asks.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeinf.offload.budget import DoesNotFit
from moeinf.runtime.config import EngineConfig, ServerSettings, Settings
from moeinf.runtime.device_plan import DeviceDoesNotFit
from moeinf.runtime.library import Library
from moeinf.runtime.manifest import Manifest
from moeinf.runtime.memory import return_free_pages
from moeinf.runtime.names import ModelName

if TYPE_CHECKING:
    from moeinf.runtime.engine import Engine
    from moeinf.server.worker import Worker

_LOOK_EVERY_S = 1.0
_TRIM_EVERY_S = 30.0


@dataclass
class Loaded:
    """A model with its worker. expires_at: seconds since the epoch; infinite: stays."""

    manifest: Manifest
    worker: Worker
    keep_alive_s: float

    @property
    def expires_at(self) -> float:
        idle_for = time.monotonic() - self.worker.last_used
        return time.time() - idle_for + self.keep_alive_s

    @property
    def expired(self) -> bool:
        worker = self.worker
        return worker.idle and time.monotonic() - worker.last_used >= self.keep_alive_s


class Host:
    """The models that are loaded now. `run` must be running for any of them to expire."""

    def __init__(self, settings: Settings, server: ServerSettings, config: EngineConfig) -> None:
        self.library = Library(settings)
        self._settings = settings
        self._server = server
        self._config = config
        self._loaded: dict[ModelName, Loaded] = {}
        self._loading: dict[ModelName, asyncio.Lock] = {}

    def loaded(self) -> list[Loaded]:
        return list(self._loaded.values())

    async def model(self, name: str, keep_alive_s: float | None = None) -> Loaded:
        """The model, loaded if need be. Raises NoSuchModel, BadName, DoesNotFit, Unloaded, …"""
        manifest, _ = self.library.read(name)
        key = manifest.model
        async with self._loading.setdefault(key, asyncio.Lock()):
            found = self._loaded.get(key)
            if found is None or found.worker.failure is not None:
                worker = await self._load(key)
                keep = self._server.keep_alive_s if keep_alive_s is None else keep_alive_s
                found = self._loaded[key] = Loaded(manifest, worker, keep)
            elif keep_alive_s is not None:
                found.keep_alive_s = keep_alive_s
        found.worker.last_used = time.monotonic()
        return found

    async def unload(self, name: str) -> bool:
        """Ends a model's engine, its requests with it; False when it is not loaded."""
        found = self._loaded.pop(self.library.find(name)[0], None)
        if found is not None:
            await asyncio.to_thread(found.worker.close)
        return found is not None

    async def run(self) -> None:
        """Unloads what has expired, and gives free memory back, until it is cancelled; then
        unloads everything."""
        trimmed = time.monotonic()
        try:
            while True:
                await asyncio.sleep(_LOOK_EVERY_S)
                if time.monotonic() - trimmed >= _TRIM_EVERY_S:
                    return_free_pages()
                    trimmed = time.monotonic()
                for key, one in list(self._loaded.items()):
                    if one.expired:
                        del self._loaded[key]
                        await asyncio.to_thread(one.worker.close)
        finally:
            workers = [one.worker for one in self._loaded.values()]
            self._loaded.clear()
            for worker in workers:
                worker.close()

    async def _load(self, key: ModelName) -> Worker:
        """Tries once more without the idle models when memory is short."""
        try:
            return await self._started(key)
        except (DoesNotFit, DeviceDoesNotFit):
            idle = [other for other, one in self._loaded.items() if one.worker.idle]
            if not idle:
                raise
            for other in idle:
                await asyncio.to_thread(self._loaded.pop(other).worker.close)
            return await self._started(key)

    async def _started(self, key: ModelName) -> Worker:
        def make() -> Engine:
            from moeinf.runtime.engine import Engine

            manifest, folder = self.library.read(str(key))
            return Engine(manifest, folder, self._config, self._settings)

        def start() -> Worker:  # not on the loop: torch, which comes in here, takes seconds
            from moeinf.server.worker import Worker

            worker = Worker(make, self._server.parallel, self._server.max_queue)
            worker.loaded.wait()
            return worker

        worker = await asyncio.to_thread(start)
        if worker.failure is not None:
            raise worker.failure
        return worker


def seconds_or_none(seconds: float) -> float | None:
    """A time for JSON, which has no infinity."""
    return None if math.isinf(seconds) else seconds
