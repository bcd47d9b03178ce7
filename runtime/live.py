"""Who is running: every live engine has a locked file in $MOEINF_HOME/run.

Does not know what an engine does. A file whose lock can be taken belongs to a process that has
died; whoever notices removes it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class LiveEngine:
    """What an engine tells others. peak_bytes: the RSS of its process once everything is full."""

    pid: int
    model: str
    peak_bytes: int

    def unfilled_bytes(self) -> int:
        """Memory that it has been promised and does not hold yet."""
        with suppress(OSError, ValueError, IndexError):
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
            return max(0, self.peak_bytes - pages * os.sysconf("SC_PAGE_SIZE"))
        return self.peak_bytes


class Registration:
    """An engine's entry; it lasts until `close`, or until the process ends in whatever way."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    def close(self) -> None:
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


class Registry:
    """The folder $MOEINF_HOME/run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def register(self, model: str, peak_bytes: Callable[[int], int | None]) -> Registration | None:
        """Enters this process, in one step with what that depends on.

        peak_bytes is asked with the bytes that all others have been promised and do not hold yet,
        and answers what this process will hold, or None when the model has gone meanwhile.
        """
        with self._locked():
            peak = peak_bytes(sum(engine.unfilled_bytes() for engine in self._engines()))
            if peak is None:
                return None
            path = self._folder / f"{os.getpid()}-{secrets.token_hex(4)}.json"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            registration = Registration(path, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                entry = LiveEngine(os.getpid(), model, peak)
                os.write(descriptor, json.dumps(asdict(entry)).encode())
            except BaseException:
                registration.close()
                raise
            return registration

    def engines(self) -> list[LiveEngine]:
        """Every live engine, this process's own included; none where nobody may write."""
        try:
            with self._locked():
                return self._engines()
        except OSError as error:
            if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
                return []
            raise

    @contextmanager
    def frozen(self) -> Iterator[list[LiveEngine]]:
        """The live engines, and the certainty that none appears before this ends."""
        with self._locked():
            yield self._engines()

    def _engines(self) -> list[LiveEngine]:
        found = []
        for path in sorted(self._folder.glob("*.json")):
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)  # its process has died
            except BlockingIOError:
                with suppress(ValueError, TypeError):
                    found.append(LiveEngine(**json.loads(os.read(descriptor, 65536))))
            finally:
                os.close(descriptor)
        return found

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
