"""Change the memory of a running engine's experts between two passes.

Any thread may ask. A pass holds the lock, and a thread that runs passes without a pause makes the
the requested moves before the next one: a lock alone would let it go first forever.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from moeinf.runtime.invalid import InvalidValue

_LOOK_EVERY_S = 0.05


def _ignore(_line: str) -> None: ...


class Watch(Protocol):
    """A thread that requests moves by itself."""

    def start(self) -> None: ...

    def close(self) -> None:
        """End the thread, and wait for its end."""
        ...


@dataclass
class Moves:
    """The numbers of moves since the engine was opened."""

    grown: int = 0
    shrunk: int = 0


class MovingMemory:
    """The slots of experts in RAM, which change only while no pass runs.

    tell: takes a line per move. fixed: the reason why nothing can change; "" if it can.
    """

    def __init__(
        self,
        slots: int,
        resize: Callable[[int], int],
        tell: Callable[[str], None],
        fixed: str = "",
    ) -> None:
        """Set up. resize: uses a number of slots, and returns how many are used then."""
        self.slots, self.first_slots = slots, slots
        self.moves = Moves()
        self.tell, self._fixed = tell, fixed
        self._resize = resize
        self._lock = threading.RLock()
        self._asked: deque[tuple[int, str, Future[int]]] = deque()
        self._closed = False
        self._watch: Watch | None = None
        self._watch_changes = threading.Lock()

    def watched_by(self, watch: Watch | None) -> None:
        """Let another thread look at the machine's memory from now on; None: no thread."""
        with self._watch_changes:
            if self._watch is not None:
                self._watch.close()
            self._watch = None if self._closed else watch
            if self._watch is not None:
                self._watch.start()

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._asked:
            self._serve()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def move(self, slots: int, why: str) -> int:
        """Use this number of slots from the next pass on; return how many are used then.

        why: ends the line about it. Raises InvalidValue where nothing can change, and
        ExpertReadError where reads hang.
        """
        if self._fixed:
            raise InvalidValue(self._fixed)
        done: Future[int] = Future()
        self._asked.append((slots, why, done))
        while not done.done():
            if self._lock.acquire(timeout=_LOOK_EVERY_S):
                try:
                    self._serve()
                finally:
                    self._lock.release()
        return done.result()

    def close(self) -> None:
        """Refuse all further moves, and let go of the engine."""
        with self._lock:
            self._closed = True
            self._serve()
        self.watched_by(None)
        self._resize, self.tell = int, _ignore

    def _serve(self) -> None:
        """Make the requested moves. The caller holds the lock."""
        while self._asked:
            slots, why, done = self._asked.popleft()
            try:
                done.set_result(self._moved(slots, why))
            except Exception as error:
                done.set_exception(error)

    def _moved(self, slots: int, why: str) -> int:
        if self._closed:
            raise InvalidValue("the engine is closed")
        before, self.slots = self.slots, self._resize(slots)
        if self.slots > before:
            self.moves.grown += 1
        elif self.slots < before:
            self.moves.shrunk += 1
        if self.slots != before:
            self.tell(f"experts in RAM: {self.slots:,} slots instead of {before:,} ({why})")
        return self.slots
