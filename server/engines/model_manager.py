"""Load an engine when a request names its model, and unload it after an idle time.

The event loop calls this module; engines have their own threads. The first engine imports torch, so
that a server starts at once and stays small until the first request.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from moeinf.errors import MoeinfError, reason
from moeinf.offload.store.budget import DoesNotFit
from moeinf.runtime.config import EngineConfig, ServerSettings, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.engine.loader import LoadProgress
from moeinf.runtime.generation.events import Ended
from moeinf.runtime.library.library import Library, ModelInUse
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.machine.memory import return_free_pages
from moeinf.runtime.names import ModelName
from moeinf.runtime.placement.decode_speed import remember_prefill, remember_speed
from moeinf.runtime.placement.gpu_plan import DeviceDoesNotFit
from moeinf.server.engines.jobs import Unloaded
from moeinf.server.engines.worker import Worker

_LOOK_EVERY_S = 1.0
_TRIM_EVERY_S = 30.0
_DRAIN_LOOK_S = 0.05  # between two checks that a model's last request has ended
_GRACE_S = 1.0  # between `model` and the first job, in which an engine does not expire
_LAST_CLOSE_S = 3.0  # for all engines to end when the server ends
_STUCK = "the engine is in a native call that does not return; restart the server"


@dataclass
class Loaded:
    """A model with its worker.

    expires_at: seconds since the epoch; infinite if it is never unloaded.
    users: requests of several jobs in progress, which also need the engine between two jobs.
    """

    manifest: Manifest
    worker: Worker
    keep_alive_s: float
    users: int = 0

    @property
    def expires_at(self) -> float:
        idle_for = time.monotonic() - self.worker.last_used if self.idle else 0.0
        return time.time() - idle_for + self.keep_alive_s

    @property
    def idle(self) -> bool:
        return not self.users and self.worker.idle

    @property
    def expired(self) -> bool:
        keep_s = max(self.keep_alive_s, _GRACE_S)
        return self.idle and time.monotonic() - self.worker.last_used >= keep_s

    @contextmanager
    def used(self) -> Iterator[None]:
        """Keep the engine from being idle inside the block."""
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1


class ModelManager:
    """Load models on demand, and unload them. They expire only while `run` runs."""

    def __init__(
        self,
        settings: Settings,
        server: ServerSettings,
        config: EngineConfig,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Start without models. tell: receives each choice and note of an engine, on its thread."""
        self.library = Library(settings)
        self._tell = tell
        self._settings = settings
        self._server = server
        self._config = config
        self._loaded: dict[ModelName, Loaded] = {}
        self._loading: dict[ModelName, asyncio.Lock] = {}
        self._starting: dict[ModelName, LoadProgress] = {}
        self._own_context: dict[ModelName, int] = {}  # in tokens, where no request named one
        self._closing: set[asyncio.Future[bool]] = set()
        self._discarding: set[asyncio.Future[bool]] = set()
        self._unended: list[Worker] = []  # closed, and possibly still running
        self.failure = ""  # of the last load, if neither the model nor memory caused it

    @property
    def stuck(self) -> bool:
        """True if a closed engine is in a native call that does not return."""
        return any(not worker.close(0) for worker in self._unended)

    @property
    def in_use(self) -> bool:
        """True while a model is loaded or is being unloaded."""
        return bool(self._loaded or self._closing)

    def loaded(self) -> list[Loaded]:
        return [one for one in self._loaded.values() if one.worker.failure is None]

    def starting(self) -> dict[ModelName, LoadProgress]:
        """Return the models that are being loaded, and how much of each is read."""
        return dict(self._starting)

    async def model(
        self, name: str, keep_alive_s: float | None = None, context: int | None = None
    ) -> Loaded:
        """Return the model; load it if needed.

        context: tokens, at most the model's own; None: the server's choice. A model with a smaller
        one is loaded again after its requests, unless `serve --ctx` bounds it. Raises NoSuchModel,
        BadName, DoesNotFit, Unloaded, and what an engine raises on loading.
        """
        if self._config.context is not None:
            context = None
        # A live engine's files cannot be replaced, so that a loaded model is not read again.
        key, _ = await asyncio.to_thread(self.library.find, name)
        async with self._loading.setdefault(key, asyncio.Lock()):
            found = self._loaded.get(key)
            if found is not None and self._is_too_small(key, found, context):
                await self._leave(key, found)
                found = None
            if found is None or found.worker.failure is not None:
                manifest, worker = await self._load(key, context)
                keep = self._server.keep_alive_s if keep_alive_s is None else keep_alive_s
                found = self._loaded[key] = Loaded(manifest, worker, keep)
                engine = worker.engine
                if context is None and engine is not None:
                    self._own_context[key] = engine.info.context
            elif keep_alive_s is not None:
                found.keep_alive_s = keep_alive_s
        found.worker.last_used = time.monotonic()
        return found

    def _is_too_small(self, key: ModelName, found: Loaded, context: int | None) -> bool:
        """Return True if a model that works has a smaller context than a request needs."""
        engine = found.worker.engine
        if engine is None or found.worker.failure is not None:
            return False
        most = found.manifest.max_context
        return engine.info.context < min(context or self._own_context.get(key, most), most)

    async def _leave(self, key: ModelName, found: Loaded) -> None:
        """Unload a model once it is idle. No request can begin meanwhile: the lock is held."""
        while not (found.idle and time.monotonic() - found.worker.last_used >= _GRACE_S):
            await asyncio.sleep(_DRAIN_LOOK_S)
        if self._loaded.get(key) is found:
            del self._loaded[key]
            if not await self._close(found.worker):
                raise Unloaded(_STUCK)

    def _expires_at(self, key: ModelName) -> int | None:
        """Return when the model expires without further requests, in seconds since the epoch.

        None: it never expires, or is not loaded. `ps` shows the time. Other threads call this.
        """
        found = self._loaded.get(key)
        if found is None or math.isinf(found.expires_at):
            return None
        return round(found.expires_at)

    async def unload(self, name: str, only_idle: bool = False) -> bool:
        """End a model's engine and its requests; return False if it is not loaded.

        Raises Unloaded when the engine does not end. With `only_idle`, raises ModelInUse instead of
        ending a request.
        """
        key, _ = await asyncio.to_thread(self.library.find, name)
        found = self._loaded.get(key)
        if only_idle and found is not None and not found.idle:
            raise ModelInUse(f"{key} is answering a request")
        self._loaded.pop(key, None)
        if found is not None and not await self._close(found.worker):
            raise Unloaded(_STUCK)
        return found is not None

    async def run(self) -> None:
        """Unload expired models and return free memory to the system; on cancel, unload all."""
        trimmed = time.monotonic()
        try:
            while True:
                await asyncio.sleep(_LOOK_EVERY_S)
                if time.monotonic() - trimmed >= _TRIM_EVERY_S:
                    return_free_pages()
                    trimmed = time.monotonic()
                await self._unload_where(lambda one: one.expired)
        finally:
            workers = [one.worker for one in self._loaded.values()]
            self._loaded.clear()
            until = time.monotonic() + _LAST_CLOSE_S
            for worker in workers:
                worker.close(0)  # start to end all of them at once
            for worker in workers:
                worker.close(max(0.0, until - time.monotonic()))
            self._unended += workers

    async def _unload_where(self, leaves: Callable[[Loaded], bool]) -> bool:
        """Unload the models for which `leaves` is true; return True if there was one.

        `leaves` is called just before each unload, because the wait for another may change it.
        """
        any_left = False
        for key in list(self._loaded):
            found = self._loaded.get(key)
            if found is not None and leaves(found):
                del self._loaded[key]
                await self._close(found.worker)
                any_left = True
        return any_left

    async def _close(self, worker: Worker) -> bool:
        """End an engine; if it does not end, write a line and return False.

        Loads wait meanwhile, because its memory is not free yet.
        """
        closing = asyncio.ensure_future(asyncio.to_thread(worker.close))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        ended = await asyncio.shield(closing)
        await asyncio.to_thread(return_free_pages)
        if not ended:
            self._unended = [one for one in (*self._unended, worker) if not one.close(0)]
            self._tell(_STUCK)
        return ended

    async def _load(self, key: ModelName, context: int | None) -> tuple[Manifest, Worker]:
        """Start an engine; keep in `failure` why that failed, if the model is not the cause."""
        try:
            found = await self._fitted(key, context)
        except (MoeinfError, OSError, MemoryError):
            raise
        except Exception as error:
            self.failure = f"{key} could not be loaded: {reason(error)}"
            raise
        self.failure = ""
        return found

    async def _fitted(self, key: ModelName, context: int | None) -> tuple[Manifest, Worker]:
        """Start an engine; if it does not fit, unload the idle models and try again."""
        try:
            return await self._started(key, context)
        except (DoesNotFit, DeviceDoesNotFit) as error:
            asked = isinstance(error, DoesNotFit) and self._config.memory is not None
            if asked or not await self._unload_where(lambda one: one.idle):
                raise  # the given --memory is too little, or no idle model was there to unload
            return await self._started(key, context)

    def _remember(self, engine: Engine, ended: Ended) -> None:
        """Keep the speed of an answer for `moeinf plan`, which reads these figures as the CPU's."""
        if engine.gpu is None and self._config.trace:
            about = (self._settings, engine.info.name, engine.info.slots)
            remember_speed(*about, ended.tokens - 1, ended.decode_seconds)
            read = ended.prompt_tokens - ended.cached_tokens
            remember_prefill(*about, read, ended.prefill_seconds)

    async def _started(self, key: ModelName, context: int | None) -> tuple[Manifest, Worker]:
        def start() -> tuple[Manifest, Worker]:
            manifest, folder = self.library.read(str(key))
            config = self._config
            if config.draft is not None and self.library.find(config.draft)[0] == key:
                config = replace(config, draft=None)
            if context is not None:
                config = replace(config, context=min(context, manifest.max_context))

            progress = LoadProgress()

            def make() -> Engine:
                ends = partial(self._expires_at, key)
                return Engine.open(manifest, folder, config, self._settings, ends, progress)

            def tell(line: str) -> None:
                self._tell(f"{key}: {line}")

            parallel, queue = self._server.parallel, self._server.max_queue
            self._starting[key] = progress
            try:
                worker = Worker(make, parallel, queue, tell, self._remember)
                worker.loaded.wait()
            finally:
                del self._starting[key]
            return manifest, worker

        while self._closing:
            await asyncio.wait(self._closing)
        loading = asyncio.ensure_future(asyncio.to_thread(start))
        try:
            manifest, worker = await asyncio.shield(loading)
        except asyncio.CancelledError:
            loading.add_done_callback(self._discard)
            raise
        worker.check_loaded()
        return manifest, worker

    def _discard(self, loading: asyncio.Future[tuple[Manifest, Worker]]) -> None:
        """Close an engine whose load has ended after its request was cancelled."""
        if not loading.cancelled() and loading.exception() is None:
            closing = asyncio.ensure_future(self._close(loading.result()[1]))
            self._discarding.add(closing)
            closing.add_done_callback(self._discarding.discard)
