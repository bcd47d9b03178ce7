"""Stages of a model in threads of this process, and a first stage that is connected with them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeinf.models.base import State
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.engine.pipeline.stage import Stage
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.sizes import parse_memory

Logits = list[NDArray[np.float32]]
LONG = [3 + (37 * place) % 90 for place in range(280)]  # two chunks of a prompt


def config(memory: str = "100%", **options: Any) -> EngineConfig:
    return EngineConfig(memory=parse_memory(memory), trace=False, speculation=False, **options)


class Running:
    """A stage that serves in a thread, at an address of its own. tell: what it has told."""

    def __init__(self, stage: Stage, silence_s: float = 60.0) -> None:
        self.stage, self.told, self.door = (
            stage,
            list[str](),
            socket.create_server(("127.0.0.1", 0)),
        )
        self.address = f"127.0.0.1:{self.door.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, args=(silence_s,), daemon=True)
        self._thread.start()

    def _serve(self, silence_s: float) -> None:
        with suppress(_Ended):
            self.stage.serve(self.door, self._tell, silence_s)

    def _tell(self, line: str) -> None:
        self.told.append(line)
        if line.startswith("a connection failed"):
            raise _Ended

    def close(self) -> None:
        """Close the door, which ends the thread, and the stage."""
        with suppress(OSError):
            self.door.shutdown(socket.SHUT_RDWR)
        self._thread.join(30)
        assert not self._thread.is_alive()
        self.door.close()
        self.stage.close()


class _Ended(Exception):
    """The door is closed."""


@contextmanager
def stages(
    manifest: Manifest,
    folder: Path,
    settings: Settings,
    cuts: Sequence[int],
    stop: int,
    silence_s: float = 60.0,
    **options: Any,
) -> Iterator[list[Running]]:
    """Yield running stages: from each cut to the next one, and from the last to `stop`."""
    with ExitStack() as opened:
        found = []
        for first, end in zip(cuts, [*cuts[1:], stop], strict=True):
            stage = Stage(manifest, folder, first, end, config(**options), settings)
            found.append(Running(stage, silence_s))
            opened.callback(found[-1].close)
        yield found


def used(engine: Engine, long: Sequence[int]) -> Logits:
    """Return the logits of two conversations: a prompt, tokens, both at once, a shorter text."""
    found: Logits = []

    def extended(state: State, ids: Sequence[int]) -> None:
        found.append(engine.extend(state, ids).copy())

    one, other = engine.new_state(), engine.new_state()
    for state in (one, other):
        engine.begin_request(state)
    extended(one, long)
    for token in (5, 6):
        extended(one, [token])
    extended(other, [4, 5, 6])
    if engine.batches:
        found.append(engine.step([(one, 8), (other, 9)]).copy())
    engine.end_request(one.request, counts=False)
    one.truncate(len(long) // 2)
    engine.begin_request(one)
    extended(one, [1, 2, 3])
    extended(one, [7])
    extended(other, [2])
    return found


def same(one: Logits, other: Logits) -> bool:
    return len(one) == len(other) and all(map(np.array_equal, one, other))


def opened(home: Path, *addresses: str, model: str = "demo", **options: Any) -> Engine:
    """Open a first stage; without addresses a whole engine."""
    settings = Settings(home, stage_key=options.pop("key", None))
    given = config(stages=addresses, **options)
    return Engine.open(*Library(settings).read(model), given, settings)


def works(home: Path, address: str) -> None:
    """Check that a new first stage gets the bits of one engine."""
    with opened(home) as whole, opened(home, address, parallel=2) as engine:
        assert same(used(engine, LONG), used(whole, LONG))
