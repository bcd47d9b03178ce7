"""Answer requests in an actor: the whole application, called in memory instead of by a socket.

The ingress (ingress.py) sends the ASGI scope and body of a request, and gets the messages of the
answer. So every endpoint, stream and error is the one of a single machine.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from moeinf.offload.replicas.route_keys import RouteKeys
from moeinf.offload.replicas.router import Observed, Published
from moeinf.offload.routing.trace import RequestEam
from moeinf.runtime.config import EngineConfig, ServerSettings, read_environment
from moeinf.runtime.machine.memory import keep_heap_small
from moeinf.runtime.names import BadName, parse_name
from moeinf.runtime.prefix.tree import BLOCK, Match
from moeinf.server.app import create_app
from moeinf.server.engines.jobs import ROUTED, STORED
from moeinf.server.engines.model_manager import Loaded

_MOST_PREFIXES = 1 << 12  # published per model
_MOST_OBSERVED = 64  # requests, published at a time
_MOST_NAMES = 64  # of models, as clients write them
_GOODBYE_S = 5.0  # for an answer whose client has gone to end by itself
_QUEUE = 64  # messages of an answer that the ingress has not taken


class _Model:
    """The state to publish about one model, under the name that clients use. Threads share it."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[int, bytes] = OrderedDict()  # by prefix: where its KV ends
        self._observed: OrderedDict[int, Observed] = OrderedDict()  # by request
        self._lock = threading.Lock()
        self.number = 0

    def stored(self, keys: RouteKeys, found: Match, tokens: int) -> None:
        """Note the nodes that hold the prefixes of a prompt. The engine's thread calls this."""
        with self._lock:
            for digest, node in ends(keys, found, tokens):
                self._nodes[digest] = node
                self._nodes.move_to_end(digest)
            while len(self._nodes) > _MOST_PREFIXES:
                self._nodes.popitem(last=False)

    def routed(self, keys: RouteKeys, eam: RequestEam | None, ended: bool) -> None:
        """Note a request's routing so far, or in the end. The engine's thread calls this."""
        if eam is None:
            return
        with self._lock:
            self._observed[keys.number] = Observed(keys.number, eam.prefill + eam.decode, ended)
            while len(self._observed) > _MOST_OBSERVED:
                self._observed.popitem(last=False)

    def publish(self, loaded: Loaded) -> Published | None:
        """Return what is to be known about the model; None while it has no engine.

        A prefix whose node has left the prefix cache is left out. After a new load only what is on
        disk is held.
        """
        engine = loaded.worker.engine
        if engine is None:
            return None
        table = engine.store.host.table
        with self._lock:
            observed = tuple(self._observed.values())
            self._observed.clear()
            nodes = dict(self._nodes)
        held = set() if engine.prefixes is None else engine.prefixes.held(nodes.values())
        prefixes = frozenset(digest for digest, node in nodes.items() if node in held)
        self.number += 1
        return Published(self.number, table.resident(np.arange(table.cells)), prefixes, observed)


def ends(keys: RouteKeys, found: Match, tokens: int) -> Iterator[tuple[int, bytes]]:
    """Yield each prefix of a prompt that is held to a block, and the key of the node it ends in.

    found: what the prefix cache holds of the prompt's `tokens`, which are taken to be spread evenly
    over its bytes. A recurrent model continues only from a snapshot, which is the last node.
    """
    for digest, share in zip(keys.prefixes, keys.shares, strict=False):
        end = max(1, math.ceil(share * tokens))
        if not found.path or end - found.tokens >= BLOCK:
            continue
        node = found.path[min(math.ceil(end / BLOCK), len(found.path)) - 1]
        if node.snapshot or not found.path[-1].snapshot:
            yield digest, node.key


class Replica:
    """The application of one replica. `open` it, and `close` it after its last answer."""

    def __init__(
        self,
        config: EngineConfig,
        server: ServerSettings,
        say: Callable[[str], None] = print,
        eams: bool = True,
    ) -> None:
        """Build the application, without a model. Its folder is that of the machine it runs on.

        eams: publish the EAMs of requests. Only the router `experts` reads them.
        """
        keep_heap_small()
        self._eams = eams
        # The ingress has checked key, origin and host.
        inner = replace(server, api_key=None, origins=("*",))
        self._app = create_app(read_environment(), inner, config, say)
        self._models: OrderedDict[str, _Model] = OrderedDict()
        self._life = self._app.router.lifespan_context(self._app)

    async def open(self) -> None:
        """Start to unload models that are not used."""
        await self._life.__aenter__()

    async def answer(
        self, scope: dict[str, Any], body: bytes, keys: RouteKeys
    ) -> AsyncIterator[MutableMapping[str, Any]]:
        """Yield the ASGI messages of the answer. Leaving early cancels the request.

        keys: what the router has read.
        """
        messages: asyncio.Queue[MutableMapping[str, Any] | None] = asyncio.Queue(_QUEUE)
        gone = asyncio.Event()
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if parts:
                return parts.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            model = self._model(keys.model)
            if self._eams:
                ROUTED.set(lambda eam, ended: model.routed(keys, eam, ended))
            STORED.set(lambda found, tokens: model.stored(keys, found, tokens))
            try:
                await self._app({**scope, "state": {}}, receive, messages.put)
            finally:
                await messages.put(None)

        task = asyncio.create_task(run())
        try:
            while (message := await messages.get()) is not None:
                yield message
            await task
        finally:
            gone.set()
            if not task.done():
                await _ended(task, messages)

    def record_routing_stats(self) -> dict[str, Any]:
        """Return what the ingress reads: each loaded model's Published by name, and the metrics."""
        found = {}
        loaded = {str(one.manifest.model): one for one in self._app.state.host.loaded()}
        for name, model in list(self._models.items()):
            one = loaded.get(name) or self._of_name(name, loaded)
            published = None if one is None else model.publish(one)
            if published is not None:
                found[name] = published
        return {"models": found, "metrics": self._app.state.metrics.exposition()}

    def check_health(self) -> None:
        """Raise when an engine is in a call that does not return: Ray then replaces the replica."""
        if self._app.state.host.stuck:
            raise RuntimeError("an engine does not return")

    async def close(self) -> None:
        """End the engines."""
        await self._life.__aexit__(None, None, None)

    def _of_name(self, name: str, loaded: dict[str, Loaded]) -> Loaded | None:
        """Return the loaded model that a name means, as clients write it."""
        try:
            key = parse_name(name)
        except BadName:
            return None
        if self._app.state.host.library.has(key):
            return loaded.get(str(key))
        # A name of `moeinf create` has the tag of its base.
        same = [one for one in loaded.values() if one.manifest.model.name == key.name]
        return same[0] if len(same) == 1 else None

    def _model(self, name: str) -> _Model:
        if name not in self._models and len(self._models) >= _MOST_NAMES:
            self._models.popitem(last=False)
        return self._models.setdefault(name, _Model())


async def _ended(task: asyncio.Task[None], messages: asyncio.Queue[Any]) -> None:
    """Wait for an answer whose reader has gone; cancel it when it takes long."""
    with suppress(asyncio.CancelledError, TimeoutError, Exception):
        async with asyncio.timeout(_GOODBYE_S):
            while not task.done():
                with suppress(TimeoutError):
                    await asyncio.wait_for(messages.get(), 0.1)
    task.cancel()
