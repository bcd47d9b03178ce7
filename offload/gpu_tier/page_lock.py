"""Page-lock the host slots during the load, while enough memory stays free.

A thread locks one slice at a time. It ends when all slices are locked, when too little memory would
be left, or when the system refuses. The rest stays pageable, which is slower to copy but still
correct. `note` gives the reason.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from moeinf.native import DeviceError, HostLock

SLICE_BYTES = 256 << 20


class PageLocking:
    """The thread that locks. Other threads may use `lock` meanwhile."""

    def __init__(
        self,
        lock: HostLock,
        slots: int,
        available_bytes: Callable[[], int],
        headroom_bytes: int,
    ) -> None:
        """Start the thread. available_bytes: free memory now, of which headroom_bytes are kept."""
        self._slots, self._locked = slots, 0
        self._available, self._headroom = available_bytes, headroom_bytes
        self._ending = threading.Event()
        self._why = ""
        self._thread = threading.Thread(
            target=self._run, args=(lock,), name="page-locking", daemon=True
        )
        self._thread.start()

    def _run(self, lock: HostLock) -> None:
        while (size := lock.next_bytes) and not self._ending.is_set():
            if self._available() - size < self._headroom:
                self._why = "the machine's free memory would fall below its headroom"
                return
            try:
                lock.lock_next()
            except DeviceError as error:
                self._why = str(error)
                return
            self._locked = lock.locked_slots

    def wait(self) -> None:
        """Wait until the thread ends."""
        self._thread.join()

    def close(self) -> None:
        """Stop after the current slice; memory is unlocked with the last user of the lock."""
        self._ending.set()
        self._thread.join()

    @property
    def note(self) -> str | None:
        """The number of locked slots and why locking stopped; None without a problem."""
        if not self._why:
            return None
        return (
            f"{self._locked} of {self._slots} host slots are page-locked, the others are copied "
            f"more slowly: {self._why}"
        )
