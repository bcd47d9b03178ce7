"""Count the bytes that several threads receive, for the progress bars."""

from __future__ import annotations

import threading
from collections.abc import Callable

from moeinf.runtime.hub.download import RemoteFile
from moeinf.runtime.sizes import Progress


class Meter:
    """The sum of the bytes of all files, and those of each one."""

    def __init__(self, progress: Progress, phase: str, total: int) -> None:
        self._progress, self._phase, self._total = progress, phase, total
        self._done = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Count bytes of any file."""
        with self._lock:
            self._done += count
            self._progress(self._phase, self._done, self._total)

    def of(self, file: RemoteFile) -> Callable[[int], None]:
        """Return a function that counts the bytes of one file, on its own progress bar."""
        done = 0

        def add(count: int) -> None:
            nonlocal done
            self.add(count)
            done += count
            self._progress(file.name, done, file.size_bytes)

        return add
