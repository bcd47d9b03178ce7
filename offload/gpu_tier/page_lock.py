"""Page-locks the host slots beside the load, as long as memory stays free for everybody else.

Does not know experts or the device. A slice at a time, by a thread that ends when all is locked,
when too little memory would be left, or when the system refuses; the rest stays pageable, which
is slower to copy and never wrong, and `note` says why.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from moeinf.native import DeviceError, HostLock

SLICE_BYTES = 256 << 20


class PageLocking:
    """The thread that locks. `lock` may be used by others meanwhile."""

    def __init__(
        self,
        lock: HostLock,
        slots: int,
        available_bytes: Callable[[], int],
        headroom_bytes: int,
    ) -> None:
        """available_bytes: what is free on the machine now; headroom_bytes of it are left."""
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
        """Returns when it has got as far as it will."""
        self._thread.join()

    def close(self) -> None:
        """Ends after the slice that is being locked; a lock is undone with its last user."""
        self._ending.set()
        self._thread.join()

    @property
    def note(self) -> str | None:
        """What was not locked, and why; None while or when all is well."""
        if not self._why:
            return None
        return (
            f"{self._locked} of {self._slots} host slots are page-locked, the others are copied "
            f"more slowly: {self._why}"
        )
