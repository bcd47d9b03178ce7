"""Keep one entry file per live process, locked as long as that process lives.

If another process can take the lock, the owner has died, and that process removes the file. All
functions run within the lock of the folder (processes.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from moeinf.runtime.files.atomic import write_all
from moeinf.runtime.system import NO_WAIT, lock

_MOST_BYTES = 65536


class Entry:
    """The entry of this process. It lasts until `close`, or until the process ends."""

    def __init__(self, folder: Path, suffix: str, about: msgspec.Struct) -> None:
        """Create, lock and write the file. Raises OSError."""
        self.path = folder / f"{os.getpid()}-{os.urandom(4).hex()}{suffix}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        self._descriptor = os.open(self.path, flags, 0o600)
        try:
            lock(self._descriptor)
            write_all(self._descriptor, msgspec.json.encode(about), folder)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._descriptor >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def live_entries(folder: Path, suffix: str) -> Iterator[tuple[Path, bytes]]:
    """Yield the entries of live processes, not yet decoded; remove those of dead ones."""
    for path in sorted(folder.glob(f"*{suffix}")):
        try:
            descriptor = os.open(path, os.O_RDWR | NO_WAIT)
        except OSError:  # it was just removed, or is not a file
            continue
        try:
            lock(descriptor, wait=False)
            path.unlink(missing_ok=True)
            figures_path(path).unlink(missing_ok=True)
        except BlockingIOError:
            yield path, os.read(descriptor, _MOST_BYTES)
        finally:
            os.close(descriptor)


def figures_path(entry: Path) -> Path:
    """Return the path of the figures of an engine's entry."""
    return entry.with_suffix(".figures")


def started_ticks(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot; 0 if unknown."""
    with suppress(OSError, ValueError, IndexError):
        about = Path(f"/proc/{pid}/stat").read_text()
        return int(about.rpartition(")")[2].split()[19])  # field 22; field 2 is (name)
    return 0
