"""Give memory of experts back while the machine is short of it, and take it back slowly.

    free < LOW of the machine        give back at once, until GOAL is free
    LOW … HIGH                       nothing
    free > HIGH for PATIENCE_S       take STEP of the first slots back, down to GOAL, and wait again

`--memory` without a value of the user's is what this applies to.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from moeinf.runtime.engine.moving_memory import MovingMemory
from moeinf.runtime.machine.memory import available_bytes, total_bytes

LOW, GOAL, HIGH = 0.10, 0.125, 0.20  # shares of the machine's memory that are free
EVERY_S, PATIENCE_S = 2.0, 30.0
STEP = 0.05


class MemoryWatch:
    """Looks at the machine's free memory, on a thread of its own once started."""

    def __init__(
        self,
        memory: MovingMemory,
        slot_bytes: int,
        min_slots: int,
        free: Callable[[], int] = available_bytes,
        total: int | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set up. min_slots: with fewer the engine does not work. free, total: bytes."""
        self._memory, self._slot_bytes, self._min_slots = memory, slot_bytes, min_slots
        self._free, self._total, self._now = free, total or total_bytes(), now
        self._most = memory.slots  # it never takes more than it had
        self._quiet_since: float | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Move slots if the free memory requires it."""
        memory, size, free = self._memory, self._slot_bytes, self._free()
        if free < LOW * self._total:
            self._quiet_since = None
            gone = -(-round(GOAL * self._total - free) // size)
            wanted = max(self._min_slots, memory.slots - gone)
            if wanted < memory.slots:
                memory.move(wanted, f"{free / self._total:.0%} of the machine's memory is free")
            return
        if free <= HIGH * self._total or memory.slots >= self._most:
            self._quiet_since = None
            return
        if self._quiet_since is None:
            self._quiet_since = self._now()
        if self._now() - self._quiet_since < PATIENCE_S:
            return
        self._quiet_since = None
        room = round(free - GOAL * self._total) // size
        more = min(max(1, round(STEP * self._most)), room, self._most - memory.slots)
        if more > 0:
            memory.move(memory.slots + more, "memory is free again")

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(EVERY_S):
            try:
                self.look()
            except Exception as error:  # an engine that fails for another reason reports it itself
                self._memory.tell(f"the memory of experts stays as it is: {error}")
                return
