"""A further stage: compute some layers for the process that holds the first ones.

It greets connections beside each other, and serves one at a time. Its states end with the
connection.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from moeinf.errors import reason
from moeinf.models.layers.kv_cache import KvCache
from moeinf.offload.store.expert_store import Stopped
from moeinf.runtime.config import PREFILL_CHUNK, EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.engine.pipeline.cut import Part, cut
from moeinf.runtime.engine.pipeline.greeting import Greeter
from moeinf.runtime.engine.pipeline.messages import About, Begin, Pass, Reply, Rows, bytes_of
from moeinf.runtime.engine.pipeline.wire import SILENCE_S, Lost, Wire
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.version import arithmetic, version
from moeinf.runtime.visible import visible

_BUSY_S = 1.0  # between two messages of a long pass
_MOST_WORDS = 500


@dataclass
class _Held:
    """A state, and the request that it belongs to in the first stage."""

    state: KvCache
    request: int


class Stage:
    """An engine of some layers. Close it after use. One thread drives it."""

    def __init__(
        self,
        manifest: Manifest,
        folder: Path,
        first: int,
        stop: int,
        config: EngineConfig,
        settings: Settings,
    ) -> None:
        """Load the layers first … stop - 1. Raises CannotCut, and what Engine.open raises."""
        self.part: Part = cut(manifest, folder, first, stop)
        self._parallel, self._key = config.parallel, settings.stage_key
        self._dtype = getattr(torch, self.part.dtype_of_states)
        self._engine = Engine.open(self.part, folder, config, settings)
        try:
            self._engine.store.warm(range(self.part.layers * self.part.experts))
        except BaseException:
            self._engine.close()
            raise

    @property
    def choices(self) -> tuple[str, ...]:
        """A line per decision of the load."""
        return self._engine.info.choices

    def close(self) -> None:
        """Release the engine."""
        self._engine.close()

    def serve(
        self, door: socket.socket, tell: Callable[[str], None], silence_s: float = SILENCE_S
    ) -> None:
        """Serve one connection after the other, until an exception such as KeyboardInterrupt.

        tell: is told what happens, in words.
        """
        greeter = Greeter(door, self._key, silence_s, tell)
        with closing(greeter):
            while True:
                host, wire = greeter.next()
                with closing(wire):
                    greeter.tell(f"connected with {host}")
                    try:
                        self._serve(wire)
                    except Lost as error:
                        greeter.tell(f"no longer connected with {host}: {error}")
                    except Exception as error:  # such as no memory for its states
                        words = visible(reason(error))
                        greeter.tell(f"no longer connected with {host}: {words}")
                for line in self._engine.take_notes():
                    greeter.tell(line)

    def _serve(self, wire: Wire) -> None:
        """Compute passes until the connection is lost. Raises Lost."""
        info = self._engine.info
        wire.send(
            About(
                version(),
                arithmetic(),
                str(self.part.model),
                self.part.digest,
                self.part.first,
                self.part.stop,
                info.kv,
                info.context,
                self._parallel,
                self._engine.window,
            )
        )
        context = wire.receive(Begin).context
        if context > info.context:
            raise Lost(f"it wants a context of {context} tokens, more than {info.context}")
        held: dict[int, _Held] = {}
        try:
            while True:
                self._pass(wire, wire.receive(Pass), held, context)
        finally:
            for one in held.values():
                self._engine.end_request(one.state.request, counts=False)

    def _pass(self, wire: Wire, asked: Pass, held: dict[int, _Held], context: int) -> None:
        """Receive the states of one pass, and answer them. Raises Lost."""
        count = sum(rows.count for rows in asked.rows)
        if not count:
            return  # it stopped a pass that had ended
        self._check(asked, held, context)
        x = torch.empty(count, self.part.hidden_width, dtype=self._dtype)
        wire.receive_into(bytes_of(x))
        try:
            batch = [(rows.count, self._state(rows, held, context)) for rows in asked.rows]
            piece = PREFILL_CHUNK if asked.pieces else None
            with self._engine.stoppable(_telling(wire, asked.number)):
                x = self._engine.compute_stage(x, batch, piece)
        except Stopped:
            wire.send(Reply(asked.number, "failed", "stopped"))
        except Lost:
            raise
        except Exception as error:
            wire.send(Reply(asked.number, "failed", visible(reason(error))[:_MOST_WORDS]))
        else:
            wire.send(Reply(asked.number, "done"), bytes_of(x.contiguous()))

    def _check(self, asked: Pass, held: dict[int, _Held], context: int) -> None:
        """Raise Lost for a pass that cannot be computed, before its states take memory."""
        numbers = {rows.state for rows in asked.rows}
        count = sum(rows.count for rows in asked.rows)
        if len(numbers) < len(asked.rows) or count > self._engine.window:
            raise Lost("it asks for an impossible pass")
        if max(numbers) >= self._parallel:
            raise Lost("it asks for too many states")
        for rows in asked.rows:
            length = held[rows.state].state.length if rows.state in held else 0
            if rows.past > length or rows.past + rows.count > context:
                raise Lost("it asks for tokens that are not here")

    def _state(self, rows: Rows, held: dict[int, _Held], context: int) -> KvCache:
        """Return the state of some rows, cut to the tokens before them. Raises OutOfMemory."""
        engine, one = self._engine, held.get(rows.state)
        if one is None:
            state = engine.model.new_state(context)
            assert isinstance(state, KvCache)
            engine.begin_request(state)
            one = held[rows.state] = _Held(state, rows.request)
        elif rows.request != one.request:
            engine.end_request(one.state.request, counts=False)
            engine.begin_request(one.state)
            one.request = rows.request
        one.state.truncate(rows.past)
        return one.state


def _telling(wire: Wire, number: int) -> Callable[[], bool]:
    """Return what is asked at each layer: True once the other side stops the pass, or is gone.

    It tells the other side that this one works.
    """
    told = time.monotonic()

    def stopped() -> bool:
        nonlocal told
        if time.monotonic() - told > _BUSY_S:
            told = time.monotonic()
            wire.send(Reply(number, "busy"))
        return wire.arrives(0.0)

    return stopped
